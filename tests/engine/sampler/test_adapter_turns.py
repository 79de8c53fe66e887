"""More versions than fit vLLM's batch take turns in it, however busy some of them are."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler import adapter_cache
from skyrl_tinker.engine.sampler.adapter_cache import TURN_S, AdapterCache, AdapterLimits
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.inference.client.http_connection import HttpAnswer
from tests.engine.sampler.test_sampler_driver import FACTS
from tests.engine.support.simulation import now, simulated
from tests.support.sampler_clients import opened_fleet, vllm_client
from tests.support.scripted_replica import ScriptedReplica

TOKEN_S = 0.01
POLL_S = 0.001


class Batch(ScriptedReplica):
    """Replica with one adapter in its batch: like vLLM it passes over requests of others meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.read = lambda directory: str(directory)
        self.keep = lambda drawn: drawn // 4
        self.batch: list[str] = []
        self.asked: list[tuple[str, int]] = []

    async def request(
        self, method: str, url: str, *, json: Any = None, params: Any = None, **_: object
    ) -> HttpAnswer:
        path = urlsplit(url).path
        if not path.endswith("/generate"):
            return HttpAnswer(await self.answer(path, json or {}, params or {}), {})
        self.asked.append((json["model"], json["sampling_params"]["max_tokens"]))
        while self.batch and json["model"] not in self.batch:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return HttpAnswer(await self._compute(json), {})

    async def _compute(self, body: Mapping[str, Any]) -> Any:
        self.batch.append(body["model"])
        self.answer_s = body["sampling_params"]["max_tokens"] * TOKEN_S
        try:
            return await self.answer("/inference/v1/generate", body, {})
        finally:
            self.batch.remove(body["model"])


async def inline(function: Any, *given: Any) -> Any:
    return function(*given)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take time that the simulated loop does not see."""
    monkeypatch.setattr(adapter_cache.asyncio, "to_thread", inline)


def samplers_of(replica: Batch, *, loaded: int = 4) -> Samplers:
    client = vllm_client("http://replica", ("http://replica",))
    client.data.http = client.control.http = cast(Any, replica)
    fleet = opened_fleet(client)
    return Samplers(fleet, cast(Any, None), FACTS, AdapterLimits(loaded, 1), Metrics())


def adapters(directory: Path) -> tuple[WeightVersion, WeightVersion]:
    return tuple(WeightVersion(VersionId(number), "lora", str(directory)) for number in (1, 2))  # type: ignore[return-value]


def ask(tokens: int, *, sequences: int = 1, seed: int | None = None, scored: bool = False) -> SampleRequest:
    params = SamplingParams(max_tokens=tokens, stop=(), seed=seed)
    return SampleRequest((1, 2), sequences, params, prompt_logprobs=scored)


async def duration(samplers: Samplers, version: WeightVersion, request: SampleRequest) -> float:
    began = now()
    output = await samplers.sample(version, request)
    assert [len(each.tokens) for each in output.sequences] == [request.params.max_tokens] * request.sequences
    return now() - began


@simulated
async def test_a_small_sample_beside_streams_of_another_adapter_waits_for_a_turn_only(tmp_path: Path) -> None:
    samplers, (busy, small), finished = samplers_of(Batch()), adapters(tmp_path), list[float]()

    async def stream() -> None:
        while True:
            finished.append(await duration(samplers, busy, ask(700, sequences=4)))

    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream()) for _ in range(3)]
        waits = []
        for _ in range(20):
            await asyncio.sleep(0.7)
            waits.append(await duration(samplers, small, ask(3)))
        for each in streams:
            each.cancel()
    assert max(waits) < TURN_S + 0.1
    assert finished, "what was interrupted goes on"
    assert not samplers.in_use(busy)
    assert not samplers.in_use(small)


@pytest.mark.parametrize("given", [{"seed": 5}, {"scored": True}])
def test_what_would_have_to_start_over_ends_first(tmp_path: Path, given: dict[str, Any]) -> None:
    @simulated
    async def story() -> None:
        replica, (first, second) = Batch(), adapters(tmp_path)
        samplers = samplers_of(replica)
        async with asyncio.TaskGroup() as tasks:
            whole = tasks.create_task(duration(samplers, first, ask(500, **given)))
            await asyncio.sleep(TOKEN_S)
            await samplers.sample(second, ask(3))
        assert await whole == pytest.approx(500 * TOKEN_S)
        assert replica.asked == [("v1", 500), ("v2", 3)]

    story()


@simulated
async def test_what_cannot_be_interrupted_leaves_its_place_though_it_overlaps(tmp_path: Path) -> None:
    """Once the turn is over, its later requests wait for the next one."""
    samplers, (busy, small) = samplers_of(Batch()), adapters(tmp_path)

    async def stream(after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            await samplers.sample(busy, ask(100, seed=5))

    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(each * 0.3)) for each in range(3)]
        await asyncio.sleep(1)
        async with asyncio.timeout(60):
            assert await duration(samplers, small, ask(3)) < TURN_S + 100 * TOKEN_S + 0.1
        for each in streams:
            each.cancel()


@simulated
async def test_what_an_interruption_left_nothing_of_is_not_interrupted_again(tmp_path: Path) -> None:
    replica, (first, second) = Batch(), adapters(tmp_path)
    replica.keep = lambda drawn: 0
    samplers = samplers_of(replica)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(samplers.sample(first, ask(500)))
        await asyncio.sleep(TOKEN_S)
        for _ in range(3):
            await samplers.sample(second, ask(3))
            await asyncio.sleep(TURN_S / 10)
    assert [asked for asked in replica.asked if asked[0] == "v1"] == [("v1", 500)] * 2


@simulated
async def test_what_waits_for_one_adapter_runs_together_in_its_turn(tmp_path: Path) -> None:
    samplers, versions = samplers_of(Batch()), adapters(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            for version in versions:
                tasks.create_task(samplers.sample(version, ask(50)))
    assert now() < 3 * 50 * TOKEN_S


@simulated
async def test_what_is_loaded_takes_turns_while_adapters_cannot_be_changed(tmp_path: Path) -> None:
    """Also if requests came while it was being loaded."""
    samplers, (busy, small) = samplers_of(Batch()), adapters(tmp_path)
    await samplers.sample(small, ask(3))  # which loads it
    changing = samplers.fleet.changing

    async def change(seconds: float) -> None:
        async with changing.hold():
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as tasks:
        for work in (change(0.1), samplers.sample(busy, ask(3)), change(60.0), samplers.sample(busy, ask(3))):
            tasks.create_task(work)
            await asyncio.sleep(0.01)
        waiting = tasks.create_task(duration(samplers, small, ask(3)))
        await asyncio.sleep(0.5)
        streaming = tasks.create_task(samplers.sample(busy, ask(1000)))
        assert await waiting < 0.5 + TURN_S + 0.2
        streaming.cancel()


@pytest.mark.parametrize("loaded", [4, 1])
def test_a_place_is_lent_while_its_adapter_cannot_be_loaded(tmp_path: Path, loaded: int) -> None:
    """Not if there would be no room to load it then, as with as many adapters loaded as places."""

    @simulated
    async def story() -> None:
        samplers, (new, old) = samplers_of(Batch(), loaded=loaded), adapters(tmp_path)
        await samplers.sample(old, ask(3))  # which loads it
        changing, finished, began = samplers.fleet.changing, list[float](), now()

        async def stream() -> None:
            while True:
                await samplers.sample(old, ask(30))
                finished.append(now() - began)

        async def change() -> None:
            for seconds in (60.0, 0.2, 0.2, 0.2):
                async with changing.hold():
                    await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(change())]
            await asyncio.sleep(0.01)
            waiting = tasks.create_task(duration(samplers, new, ask(3)))
            await asyncio.sleep(0.01)
            background += [tasks.create_task(stream()) for _ in range(3)]
            assert 60 < await waiting < 60 + TURN_S + 0.2
            assert (len(finished) > 3 * 60 / (30 * TOKEN_S) * 0.9) == (loaded > 1)
            before = len(finished)
            await asyncio.sleep(TURN_S + 1)
            assert len(finished) > before, "it goes on"
            for each in background:
                each.cancel()

    story()


@simulated
async def test_a_lent_place_comes_back_from_a_load_that_is_cancelled(tmp_path: Path) -> None:
    samplers, (new, old) = samplers_of(Batch()), adapters(tmp_path)
    await samplers.sample(old, ask(3))
    async with asyncio.TaskGroup() as tasks:
        async with samplers.fleet.changing.hold():
            waiting = [tasks.create_task(samplers.sample(new, ask(3))) for _ in range(2)]
            await asyncio.sleep(0.01)
            waiting[0].cancel()
            await duration(samplers, old, ask(3))
        await waiting[1]
    assert not samplers.in_use(new)
    assert not samplers.in_use(old)
    assert now() < 1


@simulated
async def test_a_change_concerns_few_of_many_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = AdapterCache._load_in_turn, list[WeightVersion]()

    async def counted(cache: AdapterCache, version: WeightVersion, wait: Any) -> bool:
        looks.append(version)
        return await look(cache, version, wait)

    monkeypatch.setattr(AdapterCache, "_load_in_turn", counted)
    samplers = samplers_of(Batch())
    versions = [WeightVersion(VersionId(number), "lora", str(tmp_path)) for number in range(200)]
    async with asyncio.TaskGroup() as tasks:
        for version in versions:
            tasks.create_task(samplers.sample(version, ask(3)))
    assert len(looks) < 10 * len(versions)
