"""Base models that do not start beside one that does."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tinker
from safetensors.numpy import load_file, save_file

from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train
from tests.e2e.support.two_bases import Served, served, write_models
from tests.support.serve import HEAL_S, Serve
from tests.support.tiny_models import write_tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

TOKENS = random_tokens(40, seed=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """The second has weights that are not numbers, which the comparison of trainer and sampler finds.

    Those of the third are cut within their header.
    """
    directory = tmp_path_factory.mktemp("models")
    models = write_models(directory, vocab=512)
    write_tiny(directory / "third", seed=2)
    os.truncate(directory / "third" / "model.safetensors", 99)
    weights = Path(models[1]) / "model.safetensors"
    damaged = {name: np.full_like(value, np.nan) for name, value in load_file(weights).items()}
    save_file(damaged, weights, metadata={"format": "pt"})
    return *models, str(directory / "third")


@pytest.fixture(scope="module")
def both(models: tuple[str, str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("isolation") / "home"
    further = ("--also", f"{models[1]}:train,sample", "--also", models[2])
    with served(home, "--base-model", models[0], *further) as found:
        yield found


def states(server: Serve) -> dict[str, str]:
    told = httpx.get(f"{server.url}/readyz", timeout=30).json()["base_models"]
    return {Path(each["base_model"]).name: each["state"] for each in told}


def test_the_other_serves_and_its_own_requests_fail_until_it_starts(
    both: Served, models: tuple[str, str, str]
) -> None:
    server, service = both
    engine = server.find("engine")
    wait_until(lambda: states(server) == {"first": "ready", "second": "failed", "third": "failed"})
    assert server.process.stdout is not None
    banner = [server.process.stdout.readline().split(maxsplit=1)[1] for _ in models]
    cut = f"'{models[2]}/model.safetensors' is not a whole safetensors file: a header of"
    assert banner[0].startswith(f"{models[0]}, 64 tokens of context")
    assert banner[1].startswith(f"{models[1]} does not start: ")
    assert banner[2].startswith(f"{models[2]} does not start: {cut}")
    first = Client("", service, models[0]).new_lora()
    train(first, TOKENS)
    before = logprobs_of(first, TOKENS)
    told = re.escape("second does not start: ")
    with pytest.raises(tinker.TinkerError, match=told):
        service.create_lora_training_client(base_model=models[1], rank=8).result(HEAL_S)
    sampler = service.create_sampling_client(base_model=models[1]).result()
    with pytest.raises(tinker.TinkerError, match=told):
        sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)
    with (
        openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.APIStatusError, match=told),
    ):
        client.completions.create(model=models[1], prompt="2+2", max_tokens=3)
    assert np.isfinite(logprobs_of(first, TOKENS)).all()

    write_tiny(Path(models[1]), arch="llama", vocab=512, seed=1)
    wait_until(lambda: states(server) == {"first": "ready", "second": "ready", "third": "failed"})
    second = Client("", service, models[1]).new_lora()
    train(second, TOKENS)
    assert np.isfinite(logprobs_of(second, TOKENS)).all()
    assert np.isfinite(sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)[1:]).all()
    assert logprobs_of(first, TOKENS).tolist() == before.tolist()
    assert server.find("engine") == engine
