"""The port of a sampling engine, kept by each real server and by the stand-in alike."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from skyrl_tinker.domain.samples import VersionSpan
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import NotFoundError, SamplerError
from skyrl_tinker.inference.constants import BASE_MODEL, START_VERSION
from tests.inference.support.samplers import (
    Sampler,
    Served,
    ask,
    make_sampler,
    prompt_of,
    publish_adapter,
    random_adapter,
    unique,
    write_model,
)
from tests.support.sampler_clients import vllm_client
from tests.support.scripted_replica import ScriptedReplica
from tests.support.stand_in_replicas import StandIn
from tests.support.waiting import until

PROMPT = prompt_of(9)
LONG = 200
"""Tokens that take a while."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> BaseModelFacts:
    return write_model(tmp_path_factory.mktemp("base"), tied=False)


@pytest.fixture(params=["stand-in", pytest.param("vLLM", marks=pytest.mark.servers)])
def served(request: pytest.FixtureRequest) -> Served | None:
    real = request.param == "vLLM"
    return request.getfixturevalue("servers")["untied"] if real else None


@pytest.fixture
async def sampler(served: Served | None, facts: BaseModelFacts) -> AsyncIterator[Sampler]:
    async with connected(served, facts) as sampler:
        yield sampler


@asynccontextmanager
async def connected(served: Served | None, facts: BaseModelFacts) -> AsyncIterator[Sampler]:
    """Yield a client of vLLM, or of a stand-in where none is given."""
    if served is not None:
        real = make_sampler(served)
        yield real
        await real.client.close()
        return
    async with TestServer(StandIn(ScriptedReplica(answer_s=0.1)).app()) as server:
        url = str(server.make_url("")).rstrip("/")
        stand_in = Sampler(vllm_client(url, (url,)), facts)
        yield stand_in
        await stand_in.client.close()


async def test_each_sequence_has_the_tokens_asked_for_with_logprobs_and_a_version(sampler: Sampler) -> None:
    output = await sampler(BASE_MODEL, ask(PROMPT, num_samples=3, max_tokens=8))
    assert len(output.sequences) == 3
    for sequence in output.sequences:
        assert (len(sequence.tokens), len(sequence.logprobs), sequence.stop_reason) == (8, 8, "length")
        assert all(logprob <= 0 for logprob in sequence.logprobs)
        assert sequence.versions == (VersionSpan(BASE_MODEL, 0, 8),)
    assert output.prompt_logprobs is None


async def test_a_stop_token_ends_a_sequence_and_stays_in_it(sampler: Sampler) -> None:
    whole = (await sampler(BASE_MODEL, ask(PROMPT, temperature=0.0, max_tokens=12))).sequences[0].tokens
    stop = whole[4]
    request = ask(PROMPT, temperature=0.0, max_tokens=12, stop=(stop,))
    (sequence,) = (await sampler(BASE_MODEL, request)).sequences
    assert (sequence.tokens, sequence.stop_reason) == (whole[: whole.index(stop) + 1], "stop")


async def test_an_adapter_is_served_under_its_name_from_its_load_until_it_is_unloaded(
    sampler: Sampler, tmp_path: Path
) -> None:
    control, name = sampler.client.control, unique(tmp_path)
    publish_adapter(random_adapter(sampler.facts.directory, 8, 1), tmp_path / name, sampler.facts.directory)
    with pytest.raises(NotFoundError):
        await sampler(name, ask(PROMPT))
    for _ in range(2):
        await control.load_adapter(name, str(tmp_path / name))
    assert name in await control.adapters()
    (sequence,) = (await sampler(name, ask(PROMPT))).sequences
    assert sequence.versions == (VersionSpan(name, 0, 8),)
    for _ in range(2):
        await control.unload_adapter(name)
    assert name not in await control.adapters()
    shutil.rmtree(tmp_path / name)  # SGLang would load it again
    with pytest.raises(NotFoundError):
        await sampler(name, ask(PROMPT))


async def test_an_adapter_without_files_is_refused(sampler: Sampler, tmp_path: Path) -> None:
    with pytest.raises(SamplerError):
        await sampler.client.control.load_adapter("nowhere", str(tmp_path / "nowhere"))
    assert "nowhere" not in await sampler.client.control.adapters()


async def test_samples_name_the_version_that_was_set(sampler: Sampler) -> None:
    control = sampler.client.control
    assert await control.weight_version() == START_VERSION
    await control.set_weight_version("v7")
    assert await control.weight_version() == "v7"
    (sequence,) = (await sampler(BASE_MODEL, ask(PROMPT))).sequences
    await control.set_weight_version(START_VERSION)
    assert sequence.versions == (VersionSpan("v7", 0, 8),)


async def start(sampler: Sampler, tag: str) -> "asyncio.Task[object]":
    sampling = asyncio.create_task(sampler(BASE_MODEL, ask(PROMPT, num_samples=2, max_tokens=LONG), tag))
    await until(lambda: tag in sampler.client.control.in_flight.tags())
    return sampling


async def assert_complete(sampling: "asyncio.Task[object]") -> None:
    sequences = (await sampling).sequences  # type: ignore[attr-defined]
    found = [(len(sequence.tokens), sequence.stop_reason) for sequence in sequences]
    assert found == [(LONG, "length")] * 2


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_sample_stands_still_in_a_pause_and_is_complete_after_it(sampler: Sampler, mode: str) -> None:
    control = sampler.client.control
    await control.pause(mode)
    sampling = await start(sampler, "paused")
    assert await control.is_paused()
    await control.abort("paused")  # ends what a server has, and the client asks again
    assert not sampling.done()
    await control.resume()
    assert not await control.is_paused()
    await assert_complete(sampling)


@pytest.mark.parametrize("how", ["a tag", "a pause"])
async def test_a_sample_that_is_interrupted_is_complete_in_the_end(sampler: Sampler, how: str) -> None:
    control = sampler.client.control
    sampling = await start(sampler, "interrupted")
    if how == "a tag":
        await control.abort("interrupted")
    else:
        await control.pause("abort")
        await control.resume()
    await assert_complete(sampling)
    await control.abort("interrupted")  # of nothing


async def test_a_pause_that_waits_interrupts_no_sample(sampler: Sampler) -> None:
    sampling = await start(sampler, "waited for")
    await sampler.client.control.pause("wait")
    await sampler.client.control.resume()
    await assert_complete(sampling)


async def test_a_server_sleeps_and_wakes(sampler: Sampler) -> None:
    control = sampler.client.control
    await control.sleep(1)
    assert await control.is_sleeping()
    await control.wake_up(["weights"])
    await control.wake_up(["kv_cache"])
    assert not await control.is_sleeping()
    assert (await sampler(BASE_MODEL, ask(PROMPT))).sequences


async def test_a_server_says_what_it_is(sampler: Sampler) -> None:
    control = sampler.client.control
    await control.health()
    assert await control.world_sizes() == (1,)
    assert await control.max_model_len() > len(PROMPT)
    await control.reset_prefix_cache()
