"""Models wait, parked, while another base model is served, and train on as if it had not been."""

import re
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from skyrl_tinker.server.base_models import tiny_model
from tests.e2e.support.client import Client, datum, prompt, random_tokens
from tests.support.processes import free_port
from tests.support.serve import HEAL_S, serving

pytestmark = pytest.mark.long

STEP = types.AdamParams(learning_rate=1e-2)


def losses(training: tinker.TrainingClient, batches: range) -> list[float]:
    """Train on these batches; the loss of each."""
    found = []
    for number in batches:
        backward = training.forward_backward([datum(random_tokens(40, seed=number))], "cross_entropy")
        training.optim_step(STEP).result(HEAL_S)
        found.append(backward.result(HEAL_S).metrics["loss:sum"])
    return found


def test_models_come_back_with_their_base_model(tmp_path: Path) -> None:
    """So do their checkpoints and sampling clients, also if the base model has another name by then."""
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    for seed, directory in enumerate((first, second)):
        tiny_model.make_model(Path(directory), seed=seed)
    port = str(free_port())
    home = tmp_path / "home"
    tokens = prompt(random_tokens(40, seed=9))
    with serving(home, "--port", port, "--base-model", first) as server:
        service = tinker.ServiceClient(base_url=server.url)
        expected, training = (Client(server.url, service, first).new_lora() for _ in range(2))
        truth = losses(expected, range(3))
        assert losses(training, range(2)) == truth[:2]
        saved = training.save_state("saved").result(HEAL_S).path
        sampled = training.save_weights_for_sampler("sampled").result(HEAL_S).path
        sampler = service.create_sampling_client(model_path=sampled).result(HEAL_S)
        scores = sampler.compute_logprobs(tokens).result(HEAL_S)
        assert served(server.url) == [first]
    with serving(home, "--port", port, "--base-model", second) as server:
        forward = training.forward([datum(random_tokens(40, seed=0))], "cross_entropy")
        told = f"it was trained on base model {first}, and this server trains {second}; "
        with pytest.raises(tinker.RequestFailedError, match=re.escape(told)):
            forward.result(HEAL_S)
        with pytest.raises(tinker.BadRequestError, match=re.escape(f"is of base model '{first}'")):
            sampler.compute_logprobs(tokens).result(HEAL_S)
        refused = re.escape(f"is of base model '{first}', expected {second}")
        with pytest.raises(tinker.TinkerError, match=refused):
            service.create_training_client_from_state(saved).result(HEAL_S)
        with pytest.raises(tinker.TinkerError, match=refused):
            service.create_sampling_client(model_path=sampled).result(HEAL_S)
        assert served(server.url) == [second]
        other = Client(server.url, service, second).new_lora()
        assert losses(other, range(1)) != truth[:1]
    with serving(home, "--port", port, "--base-model", second, "--also", first) as server:
        assert sampler.compute_logprobs(tokens).result(HEAL_S) == pytest.approx(scores, abs=1e-4)
        with pytest.raises(
            tinker.RequestFailedError, match=f"it was trained on base model {re.escape(first)}, "
        ):
            training.forward([datum(random_tokens(40, seed=0))], "cross_entropy").result(HEAL_S)
        with pytest.raises(tinker.TinkerError, match="is served for sampling only"):
            service.create_training_client_from_state(saved).result(HEAL_S)
        assert served(server.url) == [second, first]
    named = "--base-model", first, "--model-name", "org/first"
    with serving(home, "--port", port, *named) as server, service:
        assert losses(training, range(2, 3)) == truth[2:]
        restored = service.create_training_client_from_state_with_optimizer(saved).result(HEAL_S)
        assert losses(restored, range(2, 3)) == truth[2:]
        assert sampler.compute_logprobs(tokens).result(HEAL_S) == pytest.approx(scores, abs=1e-4)
        assert served(server.url) == ["org/first"]


def served(url: str) -> list[str]:
    models = httpx.get(f"{url}/api/v1/get_server_capabilities", timeout=30).json()["supported_models"]
    return [model["model_name"] for model in models]
