"""The replicas as one: what a lost one held is tried elsewhere, and it returns with what the others have."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest

from skyrl_tinker.domain.samples import SampleOutput
from skyrl_tinker.engine.bases.base_statuses import BaseStatuses
from skyrl_tinker.engine.sampler import fleet as fleet_module
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.fleet import Equip, Fleet
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import SamplerError, TrainerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.router import Router, RouterSpec
from skyrl_tinker.store import server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from tests.inference.support.samplers import (
    Served,
    ask,
    prompt_of,
    publish_adapter,
    random_adapter,
    sample,
    unique,
)
from tests.support.failures import failing_first
from tests.support.sampler_clients import opened_fleet, vllm_client, vllm_servers
from tests.support.waiting import end

SAMPLES = 16


class Line:
    """The way to a real server, which can be cut, and held so that nothing passes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._open = asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self.url = ""

    async def lay(self) -> None:
        """Open the line, again at the address that it had."""
        port = int(self.url.rsplit(":", 1)[1]) if self.url else 0
        self._open.set()
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hold(self) -> None:
        self._open.clear()

    async def cut(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    await self._open.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()


@pytest.fixture
async def line(servers: dict[str, Served]) -> AsyncIterator[Line]:
    """A line to the second of two replicas."""
    line = Line(servers["tied"].group.urls[1])
    await line.lay()
    yield line
    await line.cut()


@pytest.fixture
async def fleet(
    request: pytest.FixtureRequest, servers: dict[str, Served], line: Line, tmp_path: Path
) -> AsyncIterator[Fleet]:
    external = vllm_servers(
        (servers["tied"].group.urls[0], line.url), startup_s=30.0, hang_s=2.0, max_model_len=2
    )
    await external.ready()
    router = Router(RouterSpec(str(tmp_path), "of the router"))
    await router.start(external.urls)
    client = vllm_client(
        router.url, external.urls, "of the router", past_proxy=getattr(request, "param", True)
    )
    yield opened_fleet(client, external, router)
    await client.close()
    await router.shutdown()


async def nothing(newcomer: RemoteInferenceClient) -> None:
    """No adapters and the base weights: what a new replica has anyway."""


@asynccontextmanager
async def supervised(
    fleet: Fleet, store: Store, bell: Doorbell, equip: Equip = nothing
) -> AsyncIterator[None]:
    status = BaseStatuses(EngineStatus(store, bell), {"tiny": fleet})
    task = asyncio.create_task(fleet.supervise(status.report, equip))
    yield
    await end(task)


async def sample_many(fleet: Fleet, model: str = "base", length: int = 120) -> list[SampleOutput]:
    async def one(index: int) -> SampleOutput:
        request = ask(prompt_of(10, seed=index), max_tokens=length)
        return await fleet.with_retry(lambda: sample(fleet.client, model, request, session_key=str(index)))

    outputs = await asyncio.gather(*(one(index) for index in range(SAMPLES)))
    assert all(len(output.sequences[0].tokens) == length for output in outputs)
    return outputs


async def until_size(fleet: Fleet, size: int) -> None:
    async with asyncio.timeout(60):
        while fleet.size != size:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def detail(store: Store) -> str:
    value = await store.read(lambda conn: server_state.get(conn, "engine"))
    assert isinstance(value, dict)
    return f"{value['state']}: {value['detail']}"


@pytest.mark.parametrize("how", ["cut", "hold"])
@pytest.mark.parametrize("fleet", [False, True], indirect=True, ids=["by the router", "past the router"])
async def test_a_lost_external_replica_is_done_without_and_taken_back_with_all_adapters(
    fleet: Fleet,
    line: Line,
    servers: dict[str, Served],
    store: Store,
    bell: Doorbell,
    tmp_path: Path,
    how: str,
) -> None:
    base, name = servers["tied"].facts.directory, unique(tmp_path)
    publish_adapter(random_adapter(base, 8, 1), tmp_path / name, base)

    async def equip(newcomer: RemoteInferenceClient) -> None:
        await newcomer.control.load_adapter(name, str(tmp_path / name))

    await fleet.adopt(equip)
    async with supervised(fleet, store, bell, equip):
        await sample_many(fleet, name)
        pending = asyncio.create_task(sample_many(fleet, name))
        await asyncio.sleep(0.05)
        if how == "cut":
            await line.cut()
        else:
            line.hold()
        await pending
        await until_size(fleet, 1)
        assert await detail(store) == "ready: 1 of 2 replicas serve"
        await sample_many(fleet, name)
        await line.cut()
        await line.lay()
        await until_size(fleet, 2)
        assert fleet.client.server_urls[1] == line.url
        assert name in await fleet.client.control.replica(line.url).adapters()
        await sample_many(fleet, name)
    await fleet.client.control.unload_adapter(name)


async def test_a_condemned_member_leaves_at_once_and_is_admitted_anew(
    fleet: Fleet, line: Line, store: Store, bell: Doorbell
) -> None:
    async with supervised(fleet, store, bell):
        await asyncio.sleep(0.1)
        async with fleet.changing.hold():  # it leaves without it, and returns only with it
            fleet.condemn(line.url, "for a test")
            assert line.url not in fleet.client.server_urls
            await asyncio.sleep(0.5)
            assert fleet.size == 1
        await until_size(fleet, 2)
        await sample_many(fleet)


async def test_what_no_loss_explains_is_raised_and_what_cannot_be_served_is_refused(
    fleet: Fleet, servers: dict[str, Served]
) -> None:
    with pytest.raises(SamplerError, match="a fault of its own"):
        await fleet.with_retry(AsyncMock(side_effect=SamplerError("a fault of its own")))
    nobody = vllm_servers(("http://127.0.0.1:9",), startup_s=1.0, hang_s=2.0, max_model_len=2)
    with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9 \(sampler_urls\) gave no answer in 1 s"):
        await nobody.ready()


async def test_what_waits_for_weights_of_a_trainer_that_died_is_tried_again_when_it_may_be_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.01)
    deaths = [TrainerError("rank 0 died")] * 10
    attempt = failing_first(partial(asyncio.sleep, 0, "sampled"), deaths)
    assert await fleet.with_retry(attempt) == "sampled"


async def test_what_fails_as_all_servers_are_ended_is_tried_again_with_the_next_ones(
    fleet: Fleet, servers: dict[str, Served]
) -> None:
    urls = fleet.client.server_urls
    failing = asyncio.Event()

    async def attempt() -> str:
        if not failing.is_set():
            failing.set()
            fleet.close()
            raise SamplerError("its connection was closed")
        return "sampled"

    sample = asyncio.create_task(fleet.with_retry(attempt))
    await failing.wait()
    assert not fleet.size
    fleet.open(fleet._servers, urls, None)
    assert await sample == "sampled"


async def test_whoever_is_equipped_joins_the_weight_transport_anew(
    fleet: Fleet, servers: dict[str, Served]
) -> None:
    """A server that was started again at its old address knows nothing of the group that it had joined."""
    transport = SharedMemoryTransport(1 << 20)
    samplers = Samplers(fleet, transport, servers["tied"].facts, AdapterLimits(8, 8), Metrics())
    transport.members = fleet.client.server_urls
    await fleet.adopt(samplers.equip)
    assert transport.members != fleet.client.server_urls
