"""`serve --sampler-urls`: vLLM servers that somebody else started, behind a router of ours."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker

from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train
from tests.inference.support.samplers import CONTEXT, Served
from tests.support.sampler_clients import vllm_client
from tests.support.serve import serving

pytestmark = pytest.mark.long


@pytest.fixture
def client(servers: dict[str, Served], tmp_path: Path) -> Iterator[Client]:
    tied = servers["tied"]
    options = ["--base-model", tied.facts.directory, "--model-name", "mine", "--max-lora-rank", "16"]
    options += ["--context-length", str(CONTEXT)]
    for url in tied.group.urls:
        options += ["--sampler-urls", f"{url}/"]
    with serving(tmp_path / "home", *options) as server, tinker.ServiceClient(base_url=server.url) as service:
        yield Client(server.url, service, "mine")
    asyncio.run(unload_all(tied.group.urls))


async def unload_all(urls: tuple[str, ...]) -> None:
    """The next one may well call others by the same names."""
    samplers = vllm_client(urls[0], urls)
    for name in await samplers.control.adapters():
        await samplers.control.unload_adapter(name)
    await samplers.close()


def test_they_serve_what_is_trained_here_and_stay_when_this_server_ends(
    client: Client, servers: dict[str, Served]
) -> None:
    tokens = random_tokens(12, seed=1)
    training = client.new_lora()
    train(training, tokens, learning_rate=1e-3)
    sampler = training.save_weights_and_get_sampling_client().result()
    for each in (sampler, client.base_sampler()):
        answers = [each.compute_logprobs(prompt([*tokens, last])).result() for last in range(8)]
        assert all(len(answer) == len(tokens) + 1 for answer in answers)
    sampled = sampler.compute_logprobs(prompt(tokens)).result()
    np.testing.assert_allclose(sampled[1:], logprobs_of(training, tokens), atol=1e-3)
