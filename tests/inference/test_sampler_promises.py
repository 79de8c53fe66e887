"""What the engine's drivers rely on of Samplers, kept by the real ones and by their stand-in alike.

The real ones have vLLM, or a stand-in for it.
"""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.samples import VersionSpan
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.inflight_targets import newest
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.protocol.queue_views import SamplingView
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from tests.inference.client.test_sampling_port import connected, facts
from tests.inference.support.samplers import Served, ask, prompt_of, publish_adapter, random_adapter
from tests.support.sampler_clients import opened_fleet
from tests.support.scripted_samplers import ScriptedSamplers

__all__ = ["facts"]

MODEL = ModelKey(1)
PROMPT = prompt_of(9)


@pytest.fixture(params=["stand-in", "of a stand-in", pytest.param("of vLLM", marks=pytest.mark.servers)])
def served(request: pytest.FixtureRequest) -> Served | str:
    found: Served | str = request.param
    return request.getfixturevalue("servers")["untied"] if found == "of vLLM" else found


@pytest.fixture
async def samplers(served: Served | str, facts: BaseModelFacts) -> AsyncIterator[Samplers]:
    if served == "stand-in":
        yield cast(Samplers, ScriptedSamplers(facts.names))
        return
    async with connected(served if isinstance(served, Served) else None, facts) as sampler:
        fleet = opened_fleet(sampler.client)
        made = Samplers(fleet, SharedMemoryTransport(1 << 20), sampler.facts, AdapterLimits(8, 8), Metrics())
        yield made
        for name in await sampler.client.control.adapters():
            await sampler.client.control.unload_adapter(name)


@pytest.fixture
def versions(facts: BaseModelFacts, tmp_path: Path) -> list[WeightVersion]:
    """Two adapters."""
    directories = [tmp_path / f"v{number}" for number in (101, 102)]
    for seed, directory in enumerate(directories):
        publish_adapter(random_adapter(facts.directory, 8, seed), directory, facts.directory)
    return [WeightVersion(VersionId(int(each.name[1:])), "lora", str(each)) for each in directories]


async def test_a_sample_has_all_its_sequences_and_what_was_asked_for_and_no_more(samplers: Samplers) -> None:
    output = await samplers.sample(None, ask(PROMPT, num_samples=3, max_tokens=4))
    assert len(output.sequences) == 3
    for sequence in output.sequences:
        assert (len(sequence.tokens), len(sequence.logprobs), sequence.stop_reason) == (4, 4, "length")
        assert sequence.versions == (VersionSpan(BASE_MODEL, 0, 4),)
        assert sequence.routed_experts is None
    assert output.prompt_logprobs is None


async def test_prompts_are_scored_after_their_first_token(samplers: Samplers) -> None:
    output = await samplers.sample(None, ask(PROMPT, max_tokens=1, prompt_logprobs=True))
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert math.isnan(first)
    assert len(others) == len(PROMPT) - 1
    assert all(math.isfinite(logprob) for logprob in others)


async def test_a_version_needs_no_load_before_its_first_sample(
    samplers: Samplers, versions: list[WeightVersion]
) -> None:
    version, _ = versions
    (sequence,) = (await samplers.sample(version, ask(PROMPT))).sequences
    assert sequence.versions == (VersionSpan(version.name, 0, 8),)
    assert not samplers.in_use(version)
    assert samplers.idle_s(version) < 1e3


async def test_a_target_stands_for_the_newest_version_of_its_model(
    samplers: Samplers, versions: list[WeightVersion]
) -> None:
    old, new = versions
    target = samplers.target(MODEL, old)
    assert samplers.target(MODEL, new) is target
    assert newest(samplers.target(MODEL, old)) == new, "publications may be reordered"
    (sequence,) = (await samplers.sample(target, ask(PROMPT))).sequences
    assert sequence.versions[-1].version == new.name
    await samplers.unload(new)
    assert newest(samplers.target(MODEL, old)) == old


async def test_what_is_published_and_dropped_never_fails(
    samplers: Samplers, versions: list[WeightVersion]
) -> None:
    gone = WeightVersion(VersionId(103), "lora", "/nowhere/v103")
    for version in (gone, versions[0]):
        await samplers.load(version)
        await samplers.announce(version)
        await samplers.announce(samplers.target(MODEL, version))
        await samplers.swaps.end_loan(version)
        await samplers.unload(version)


async def test_samplers_say_which_base_model_they_serve(samplers: Samplers) -> None:
    assert "tiny" in samplers.facts.names


async def test_samplers_that_serve_say_so(samplers: Samplers) -> None:
    assert samplers.cores >= 1
    assert samplers.view(SamplingView()).paused is None
