"""One vLLM server computes prompts, another continues them: vLLM's connector over files, our router between.

That connector knows a prompt's keys and values by its tokens alone, not by their model: so no prompt here is
sampled from two models.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from transformers import PreTrainedModel

from skyrl_tinker import config
from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.samples import SampleOutput, SampleRequest
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.launch import make_fleet, open_fleet
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import sync_weights
from tests.engine.sampler.test_fleet import supervised, until_size
from tests.inference.support.samplers import (
    Served,
    all_logprobs,
    ask,
    assert_same_logprobs,
    prompt_of,
    publish_adapter,
    random_adapter,
    reference,
    sample,
    spec_of,
    target_logprobs,
    write_model,
)
from tests.support.sampler_clients import vllm_servers

pytestmark = pytest.mark.long

LONG = 200
"""Tokens of a prompt that is sent on: more than one block of the KV cache."""


@pytest.fixture
async def pair(ray_cluster: None, tmp_path: Path) -> AsyncIterator[Served]:
    facts = write_model(tmp_path / "model", tied=False)
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    engine = VllmProcess({"kv-transfer-config": connector})
    spec = replace(spec_of(facts, tmp_path / "logs"), replicas=2, engine=engine)
    served = Served(facts, ServerGroup.launch(spec))
    await served.group.ready()
    yield served
    await served.group.shutdown()


@pytest.fixture
async def fleet(pair: Served, tmp_path: Path) -> AsyncIterator[Fleet]:
    """The first server continues what the second one began."""
    decode, prefill = pair.group.urls
    settings = config.load(decode_urls=[decode], prefill_urls=[f"{prefill}/"])
    external = vllm_servers(settings.external_urls, startup_s=30.0, hang_s=2.0, max_model_len=2)
    await external.ready()
    to_end: list[Callable[[], Awaitable[None]]] = []
    directory = pair.facts.directory
    fleet = make_fleet(settings, "of the router", SEPARATE, directory, to_end)
    await open_fleet(settings, fleet, external, tmp_path / "router", to_end)
    yield fleet
    for end in reversed(to_end):
        await end()


async def test_prompts_computed_apart_are_continued_exactly(
    fleet: Fleet, pair: Served, store: Store, bell: Doorbell, tmp_path: Path
) -> None:
    base = reference(pair.facts.directory)
    assert (fleet.cores, fleet.size) == (1, 2)
    await _assert_exact(fleet, "base", base, seed=0)
    assert _sent_on(tmp_path) > 0
    await _assert_all_parameters(fleet, base)

    adapter = random_adapter(pair.facts.directory, 8, seed=3)
    publish_adapter(adapter, tmp_path / "adapter", pair.facts.directory)
    await fleet.client.control.load_adapter("adapter", str(tmp_path / "adapter"))
    await _assert_exact(fleet, "adapter", reference(pair.facts.directory, adapter), seed=10)
    with pytest.raises(NotFoundError, match="nowhere"):
        await _sample(fleet, "nowhere", ask(prompt_of(LONG, seed=11)))

    await _assert_interrupted_while_paused(fleet, base)
    other = write_model(tmp_path / "other", tied=False, seed=7)
    transport = SharedMemoryTransport(1 << 20)
    await sync_weights(fleet.client.control, transport, Path(other.directory), "v7")
    assert await fleet.client.control.weight_version() == "v7"
    await _assert_exact(fleet, "base", reference(other.directory), seed=20)
    await _assert_followed(fleet, pair.facts, tmp_path)
    await sync_weights(fleet.client.control, transport, Path(pair.facts.directory), "base")
    await _assert_exact(fleet, "base", base, seed=30)

    decode = fleet.client.server_urls[0]
    async with supervised(fleet, store, bell):
        fleet.condemn(decode, "for a test")
        assert (fleet.cores, fleet.size) == (0, 1)
        await _assert_exact(fleet, "base", base, seed=40)
        await until_size(fleet, 2)
        assert fleet.client.server_urls[0] == decode
        before = _sent_on(tmp_path)
        await _assert_exact(fleet, "base", base, seed=50)
        assert _sent_on(tmp_path) > before


async def _sample(fleet: Fleet, model: str, request: SampleRequest, tag: str | None = None) -> SampleOutput:
    return await fleet.with_retry(lambda: sample(fleet.client, model, request, tag=tag))


async def _assert_exact(fleet: Fleet, model: str, expected: PreTrainedModel, seed: int) -> None:
    prompt = prompt_of(LONG, seed=seed)
    output = await _sample(fleet, model, ask(prompt, num_samples=3, seed=5))
    assert len({sequence.tokens for sequence in output.sequences}) == 3
    assert_same_logprobs(output, expected, prompt)


async def _assert_all_parameters(fleet: Fleet, base: PreTrainedModel) -> None:
    """Scores of the prompt, top k, seeds and stops."""
    scored = prompt_of(LONG, seed=1)
    output = await _sample(fleet, "base", ask(scored, prompt_logprobs=True, topk_sample_logprobs=2))
    assert output.prompt_logprobs is not None
    found, wanted = output.prompt_logprobs[1:], target_logprobs(base, scored)
    assert max(abs(each - other) for each, other in zip(found, wanted, strict=True)) < 1e-3
    assert all(len(listed) == 2 for listed in output.sequences[0].topk)
    prompt = prompt_of(LONG, seed=2)
    first, again = [await _sample(fleet, "base", ask(prompt, seed=9, max_tokens=6)) for _ in range(2)]
    assert first.sequences[0].tokens == again.sequences[0].tokens
    end = first.sequences[0].tokens[2]
    stopped = await _sample(fleet, "base", ask(prompt, seed=9, max_tokens=6, stop=(end,)))
    assert stopped.sequences[0].tokens[-1] == end
    greedy = (await _sample(fleet, "base", ask(prompt, temperature=0.0, max_tokens=1))).sequences[0].tokens
    assert greedy == (int(all_logprobs(base, (*prompt, 0))[-1].argmax()),)


async def _assert_interrupted_while_paused(fleet: Fleet, base: PreTrainedModel) -> None:
    """A pause holds both servers, and what is under way on either is known by its name there."""
    control, prompt = fleet.client.control, prompt_of(LONG, seed=12)
    await control.pause()
    assert await control.is_paused()
    running = asyncio.create_task(_sample(fleet, "base", ask(prompt), tag="follower"))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(60):
        await control.abort("follower")
    await asyncio.sleep(0.3)
    assert not running.done()
    await control.resume()
    assert_same_logprobs(await running, base, prompt)


async def _assert_followed(fleet: Fleet, facts: BaseModelFacts, root: Path) -> None:
    """New full parameters reach a model's running requests, which are interrupted for them and go on."""
    samplers = Samplers(fleet, SharedMemoryTransport(1 << 20), facts, AdapterLimits(8, 8), Metrics())
    directories = [
        write_model(root / f"full{number}", tied=False, seed=number).directory for number in (8, 9)
    ]
    models = {f"v{number}": reference(directory) for number, directory in enumerate(directories)}
    old, new = (WeightVersion(VersionId(number), "full", path) for number, path in enumerate(directories))
    target = samplers.target(ModelKey(1), old)
    prompt = prompt_of(30, seed=25)
    data = fleet.client.data
    with patch.object(data, "sample", wraps=data.sample) as sent:
        running = asyncio.create_task(samplers.sample(target, ask(prompt, max_tokens=220)))
        while not fleet.client.control.in_flight.tags():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await samplers.announce(samplers.target(ModelKey(1), new))
        (sequence,) = (await running).sequences
    assert sent.await_count > 1
    assert sequence.versions[-1].version == new.name
    for span in sequence.versions:
        expected = target_logprobs(models[span.version], prompt + sequence.tokens)[len(prompt) - 1 :]
        part = slice(span.start, span.end)
        np.testing.assert_allclose(sequence.logprobs[part], expected[part], atol=1e-3)


def _sent_on(root: Path) -> int:
    """Count the prompts whose keys and values the decoding server has taken from the other."""
    return (root / "logs" / "vllm-0.log").read_text().count("Inject KV cache of 128 tokens")
