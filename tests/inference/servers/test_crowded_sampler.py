"""A sampler whose KV cache and batch are taken by one client has room for the samples of others."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker.domain.ids import SessionId, VersionId
from skyrl_tinker.domain.samples import SampleRequest
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from tests.inference.support.samplers import (
    Served,
    ask,
    launch,
    make_sampler,
    prompt_of,
    publish_adapter,
    random_adapter,
)
from tests.support.sampler_clients import opened_fleet

pytestmark = pytest.mark.long

KV_TOKENS = {"kv-cache-memory-bytes": 8 << 20}
FLOOD, OTHER = SessionId("flood"), SessionId("other")
SMALL = ask(prompt_of(5, seed=1), max_tokens=3)
PROBES = 10


@pytest.fixture(scope="module")
def crowded(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One replica with a small KV cache, and one adapter in a batch."""
    root = tmp_path_factory.mktemp("crowded")
    served = launch(root, "untied", max_loras=1, max_cpu_loras=4, engine=VllmProcess(KV_TOKENS))
    asyncio.run(served.group.ready())
    yield served
    asyncio.run(served.group.shutdown())


@pytest.fixture
async def samplers(crowded: Served) -> AsyncIterator[Samplers]:
    client = make_sampler(crowded).client
    fleet, transport = opened_fleet(client), SharedMemoryTransport(1 << 20)
    yield Samplers(fleet, transport, crowded.facts, AdapterLimits(4, 1), Metrics())
    await client.close()


async def probe(samplers: Samplers, version: WeightVersion | None, flood: asyncio.Task[Any]) -> list[float]:
    """Sample little, again and again while the flood runs; return the seconds that each took."""
    clock, taken = asyncio.get_running_loop().time, list[float]()
    while not flood.done() and len(taken) < PROBES:
        began = clock()
        await samplers.sample(version, SMALL, OTHER)
        taken.append(clock() - began)
        await asyncio.sleep(0.1)
    return taken


async def test_small_samples_pass_a_large_one_that_does_not_fit_the_kv_cache(samplers: Samplers) -> None:
    flood = asyncio.create_task(
        samplers.sample(None, ask(prompt_of(6), num_samples=200, max_tokens=240), FLOOD)
    )
    await asyncio.sleep(3)  # until sequences are as long as the cache has room for
    taken = await probe(samplers, None, flood)
    assert len(taken) > 1
    assert not flood.done(), "a small sample waited for the large one"
    assert len((await flood).sequences) == 200


async def test_an_adapter_beside_streams_of_another_waits_for_its_turn(
    samplers: Samplers, tmp_path: Path
) -> None:
    versions = [WeightVersion(VersionId(n), "lora", str(tmp_path / f"v{n}")) for n in (901, 902)]
    for seed, version in enumerate(versions):
        base = samplers.facts.directory
        publish_adapter(random_adapter(base, 8, seed), Path(version.directory), base)
    busy, small = versions
    stop = asyncio.Event()

    async def stream(request: SampleRequest) -> None:
        while not stop.is_set():
            output = await samplers.sample(busy, request, FLOOD)
            assert [len(each.tokens) for each in output.sequences] == [240] * 4

    async def streams() -> None:
        requests = [ask(prompt_of(6, seed=n), num_samples=4, max_tokens=240) for n in range(3)]
        await asyncio.gather(*map(stream, requests))

    flood = asyncio.create_task(streams())
    await asyncio.sleep(1)
    taken = await probe(samplers, small, flood)
    assert len(taken) == PROBES
    stop.set()
    await flood
