"""What a client sees when the engine is killed, or the whole server restarted: a longer poll."""

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tinker
from tinker import types

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.e2e.support.client import Client, datum, prompt, random_tokens, train
from tests.support.serve import HEAL_S, Serve
from tests.support.waiting import wait_until

TOKENS = random_tokens(30, seed=1)


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


@contextmanager
def client_of(server: Serve) -> Iterator[Client]:
    """Closed at the end, or its heartbeats go on complaining."""
    with tinker.ServiceClient(base_url=server.url) as service:
        yield Client(server.url, service)


def kill_engine(server: Serve) -> None:
    engine = server.find("engine")
    assert engine is not None
    engine.kill()
    assert wait_until(lambda: not server.ready(), HEAL_S)


def test_samples_and_creations_go_on_when_the_engine_is_killed(server: Serve) -> None:
    """Every sample comes back as if nothing had happened; so does a model that is created meanwhile."""
    params = types.SamplingParams(max_tokens=200, seed=5, temperature=1.0, stop=[])
    with client_of(server) as client:
        assert wait_until(server.ready, HEAL_S)
        training = client.new_lora()
        train(training, TOKENS)
        sampler = training.save_weights_and_get_sampling_client().result()

        def ask() -> list[Any]:
            return [sampler.sample(prompt(random_tokens(8, seed=seed)), 1, params) for seed in range(40)]

        expected = [future.result().sequences[0].tokens for future in ask()]
        in_flight = ask()
        kill_engine(server)
        assert not any(future.future().done() for future in in_flight[-8:]), (
            "they had ended before the engine"
        )
        created = client.service.create_lora_training_client(base_model=client.model, rank=4)
        assert [future.result(HEAL_S).sequences[0].tokens for future in in_flight] == expected
        train(created.result(HEAL_S), TOKENS)


def test_models_go_on_when_the_engine_is_killed(server: Serve) -> None:
    """Two adapters and a full copy, to the last bit, with passes, a step and a save in flight."""
    with client_of(server) as client:
        assert wait_until(server.ready, HEAL_S)
        expected = rounds([client.new_lora(), client.new_lora(rank=4), client.new_full()], 4)
        models = [client.new_lora(), client.new_lora(rank=4), client.new_full()]
        before = rounds(models, 2)
        in_flight = [submit_round(model, 2) for model in models]
        saving = models[0].save_state("in-flight")
        kill_engine(server)
        resumed = [read_round(*each) for each in in_flight]
        assert [*before, resumed, *rounds(models, 1, first=3)] == expected
        checkpoint = saving.result(HEAL_S).path
        copy = client.service.create_training_client_from_state_with_optimizer(checkpoint).result()
        assert rounds([copy], 1, first=3)[0][0] == expected[3][0]


def submit_round(model: tinker.TrainingClient, number: int) -> tuple[Any, Any]:
    data = [datum(random_tokens(60, seed=10 * number + each)) for each in range(4)]
    backward = model.forward_backward(data, "cross_entropy")
    return backward, model.optim_step(types.AdamParams(learning_rate=1e-2))


def read_round(backward: Any, step: Any) -> tuple[float, float]:
    loss = backward.result(HEAL_S).metrics["loss:sum"]
    return loss, step.result(HEAL_S).metrics["grad_norm"]


def rounds(
    models: list[tinker.TrainingClient], count: int, first: int = 0
) -> list[list[tuple[float, float]]]:
    """Train; loss and norm of the gradients, by round and model."""
    return [
        [read_round(*each) for each in [submit_round(model, number) for model in models]]
        for number in range(first, first + count)
    ]


def test_a_restarted_server_goes_on_where_it_stopped(start: Callable[..., Serve]) -> None:
    """The same clients, over SIGTERM and, as after a reboot, with empty memory; and from checkpoints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first = start("--port", str(port)).wait_ready()
    with client_of(first) as client:
        expected = rounds([client.new_lora()], 2)
        training = client.new_lora()
        assert rounds([training], 1) == expected[:1]
        checkpoint = training.save_state("kept").result().path
        sampler = training.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(prompt(TOKENS)).result()
        first.stop()
        shutil.rmtree(Directories(Settings(home=first.home)).ephemeral_dir)
        second = start("--port", str(port)).wait_ready()
        assert rounds([training], 1, first=1) == expected[1:]
        assert sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S) == pytest.approx(scored, abs=1e-5)
        resumed = client.service.create_training_client_from_state_with_optimizer(checkpoint).result()
        assert rounds([resumed], 1, first=1) == expected[1:]
    second.stop()
