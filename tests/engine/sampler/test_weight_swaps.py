"""A replica that an update spoiled, or whose engine core is stuck, is replaced by a fresh one. Real vLLM."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.samples import SampleOutput
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.weight_swaps import WeightSwaps
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import SamplerError, StateLostError
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.weight_sync.chunks import StoredChunk
from skyrl_tinker.weight_sync.gloo import GlooSender
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import PARTIAL
from skyrl_tinker.weight_sync.transport import Message, WeightSource
from tests.engine.sampler.test_fleet import supervised
from tests.inference.support.samplers import (
    ask,
    assert_same_logprobs,
    prompt_of,
    reference,
    spec_of,
    write_model,
)
from tests.support.sampler_clients import opened_fleet, vllm_client
from tests.weight_sync.conftest import CHUNK_BYTES
from tests.weight_sync.test_pause import URL, Calls

PROMPT = prompt_of(20)
STEP_S = 4.0


@pytest.fixture
def facts(tmp_path: Path) -> BaseModelFacts:
    return write_model(tmp_path / "model", tied=True)


@pytest.fixture
async def fleet(ray_cluster: None, facts: BaseModelFacts, tmp_path: Path) -> AsyncIterator[Fleet]:
    """One replica of our own."""
    group = ServerGroup.launch(spec_of(facts, tmp_path))
    await group.ready()
    client = vllm_client(group.urls[0], group.urls)
    yield opened_fleet(client, group, step_s=STEP_S)
    await client.close()
    await group.shutdown()


class Unstaged(SharedMemoryTransport):
    """Like NCCL and CUDA IPC, for which replicas stand still. `opened`: what was sent, in order."""

    staged = False

    def __init__(self) -> None:
        super().__init__(CHUNK_BYTES)
        self.opened: list[str] = []
        self.breaks = False

    async def open(self, directory: Path):  # type: ignore[no-untyped-def]
        self.opened.append(directory.name)
        return await super().open(directory)

    async def load(self, index: int) -> Message:
        if self.breaks and index == 2:
            self.breaks = False
            raise SamplerError("the file is broken off")
        return await super().load(index)


def weights(root: Path, number: int) -> WeightVersion:
    """The base's shapes under other values."""
    write_model(root / f"v{number}", tied=True, seed=number)
    return WeightVersion(VersionId(number), "full", str(root / f"v{number}"))


@pytest.mark.long
async def test_replicas_that_an_update_spoiled_are_replaced_and_given_the_old_weights_first(
    fleet: Fleet, facts: BaseModelFacts, store: Store, bell: Doorbell, tmp_path: Path
) -> None:
    old, new = weights(tmp_path, 1), weights(tmp_path, 2)
    transport = Unstaged()
    samplers = Samplers(fleet, transport, facts, AdapterLimits(8, 8), Metrics())
    (before,) = fleet.client.server_urls

    async def sample(version: WeightVersion) -> SampleOutput:
        return await samplers.sample(version, ask(PROMPT, max_tokens=16))

    async with supervised(fleet, store, bell, samplers.equip):
        assert_same_logprobs(await sample(old), reference(old.directory), PROMPT)
        transport.breaks = True
        assert_same_logprobs(await sample(new), reference(new.directory), PROMPT)
        assert before not in fleet.client.server_urls
        with pytest.raises(StateLostError, match="save them again"):
            await sample(WeightVersion(VersionId(3), "full", str(tmp_path / "v3")))
        assert transport.opened == ["v1", "v2", "v1", "v2"]
        assert await fleet.client.control.weight_version() == "v2"

    await fleet.client.control.set_weight_version(PARTIAL)  # as an engine leaves it that dies meanwhile
    with pytest.raises(SamplerError, match="holds part of an update that failed: start it again"):
        await fleet.adopt(samplers.equip)


@pytest.mark.long
async def test_a_replica_whose_core_is_stuck_is_replaced_and_its_samples_are_not_lost(
    fleet: Fleet, facts: BaseModelFacts, store: Store, bell: Doorbell
) -> None:
    """It waits for a member of a group that never comes, for a minute."""
    samplers = Samplers(fleet, SharedMemoryTransport(CHUNK_BYTES), facts, AdapterLimits(8, 8), Metrics())
    (before,) = fleet.client.server_urls
    meeting = GlooSender(0)
    address = {"meeting": meeting.prepare(), "rank_offset": 1, "world_size": 2}
    control = fleet.client.control.replica(before)
    joining = asyncio.create_task(control.init_weight_transfer_engine({"transport": "gloo", **address}))
    await asyncio.sleep(0.5)
    async with supervised(fleet, store, bell, samplers.equip):
        output = await samplers.sample(None, ask(PROMPT, max_tokens=16))
        assert before not in fleet.client.server_urls
    with pytest.raises(SamplerError):
        await joining
    assert_same_logprobs(output, reference(facts.directory), PROMPT)


class Lent:
    """Weights that the ranks hold."""

    async def open_in_senders(self, limit: int) -> list[object]:
        raise AssertionError("the transport below does not ask them")


class Taking(SharedMemoryTransport):
    """Takes captured weights too, of which it sends the base's in place. `sources`: what it was given."""

    takes_captured = True

    def __init__(self, facts: BaseModelFacts) -> None:
        super().__init__(CHUNK_BYTES)
        self._base = Path(facts.directory)
        self.sources: list[WeightSource] = []
        self.asked, self.may_open = asyncio.Event(), asyncio.Event()

    async def open(self, source: WeightSource) -> Sequence[StoredChunk]:
        self.sources.append(source)
        self.asked.set()
        await self.may_open.wait()
        return await super().open(source if isinstance(source, Path) else self._base)


async def test_a_version_comes_from_the_ranks_while_they_lend_it_and_from_its_files_later(
    facts: BaseModelFacts, tmp_path: Path
) -> None:
    transport, captured = Taking(facts), Lent()
    client = SimpleNamespace(proxy_url="", server_urls=(URL,), control=Calls())
    metrics = Metrics()
    swaps = WeightSwaps(Fleet(cast(Any, client), (1,)), transport, facts, metrics)
    version = WeightVersion(VersionId(1), "full", str(tmp_path / "v1"))
    assert not swaps.has(version)
    swaps.lend(version, captured)
    assert swaps.has(version)
    swapping = asyncio.create_task(swaps.swap(version))
    await transport.asked.wait()
    ending = asyncio.create_task(swaps.end_loan(version))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not ending.done(), "they are being sent"
    transport.may_open.set()
    await asyncio.gather(swapping, ending)
    with pytest.raises(StateLostError, match="save them again"):
        await swaps.swap(version)
    weights(tmp_path, 1)
    await swaps.swap(version)
    counted = metrics.text().decode().splitlines()
    for name in ("weight_sync_seconds", "weight_sync_pause_seconds"):
        assert f'skyrl_tinker_{name}_count{{base_model="{facts.name}"}} 2.0' in counted
    await swaps.end_loan(version)
    assert transport.sources == [captured, tmp_path / "v1"]
