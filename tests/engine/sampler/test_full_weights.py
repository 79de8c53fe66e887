"""Requests run only on the weights they ask for, grouped, and every group gets its turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.full_weights import FullWeights
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, SampleSource, newest
from skyrl_tinker.errors import SamplerError
from tests.engine.support.simulation import simulated
from tests.support.waiting import end

A, B, C, LOST = (WeightVersion(VersionId(number), "full", f"/weights/{number}") for number in (1, 2, 3, 4))


class Server:
    """Holds one version; `swaps` is the order in which they came in."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        self.swaps: list[WeightVersion | None] = []
        self.pinned = 0  # requests that must not see a swap
        self.rollouts = 0  # that run
        self.broken = False
        self.weights = FullWeights(self)

    async def swap(self, new: WeightVersion | None) -> None:
        assert self.pinned == 0, "swapped under a request"
        await asyncio.sleep(0.001)
        if self.broken:
            raise SamplerError("disk")
        self.version = new
        self.swaps.append(new)

    @asynccontextmanager
    async def hold(self, source: SampleSource) -> AsyncIterator[None]:
        await self.weights.acquire(source)
        try:
            yield
        finally:
            self.weights.release()

    async def request(self, version: WeightVersion | None) -> None:
        async with self.hold(version):
            assert self.version == version
            self.pinned += 1
            await asyncio.sleep(0.001)
            assert self.version == version
            self.pinned -= 1

    async def rollout(self, target: InflightTarget, end: asyncio.Event) -> WeightVersion | None:
        """Returns what it ended on."""
        at_least = target.version
        async with self.hold(target):
            assert self.version is not None
            assert self.version.id >= at_least.id
            self.rollouts += 1
            await end.wait()
            return self.version

    async def until_rollouts(self, count: int) -> None:
        while self.rollouts < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@simulated
async def test_the_base_needs_no_swap() -> None:
    server = Server()
    await asyncio.gather(*(server.request(None) for _ in range(5)))
    assert server.swaps == []


@simulated
async def test_many_waiting_requests_of_a_version_share_its_swap() -> None:
    server = Server()
    await asyncio.gather(*(server.request(version) for version in (A, None) * 20))
    assert server.swaps == [A, None]


@simulated
async def test_a_waiting_group_gets_its_turn_before_newcomers_of_the_resident_one() -> None:
    server = Server()
    order: list[str] = []

    async def tell(name: str, version: WeightVersion | None) -> None:
        await server.request(version)
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tell("base 1", None))
        await asyncio.sleep(0)
        tasks.create_task(tell("A", A))
        await asyncio.sleep(0)
        tasks.create_task(tell("base 2", None))
    assert order == ["base 1", "A", "base 2"]


@simulated
async def test_groups_take_turns_under_a_steady_stream() -> None:
    server = Server()

    async def stream(version: WeightVersion | None) -> None:
        for _ in range(20):
            await server.request(version)

    await asyncio.gather(*(stream(version) for version in (None, A, B) for _ in range(3)))
    assert len(server.swaps) >= 20


@simulated
async def test_a_failed_swap_leaves_the_old_weights_and_the_next_request_tries_again() -> None:
    server = Server()
    await server.request(A)
    server.broken = True
    with pytest.raises(SamplerError, match="disk"):
        await server.request(B)
    assert server.weights.resident == A
    server.broken = False
    await server.request(A)
    await server.request(B)
    assert server.swaps == [A, B]


@simulated
async def test_where_nobody_knows_what_is_served_even_the_base_is_brought_again() -> None:
    server = Server()
    await server.request(A)
    server.weights.forget()
    await server.request(None)
    assert server.swaps == [A, None]


@simulated
async def test_dropped_weights_come_again_before_the_next_request() -> None:
    """Also the base's, and where the first try to bring them fails. A request that runs keeps its weights."""
    server = Server()
    for version in (A, None):
        async with server.hold(version):
            assert not server.weights.drop()
        assert server.weights.drop()
        server.version, server.broken = LOST, True
        with pytest.raises(SamplerError, match="disk"):
            await server.request(version)
        server.broken = False
        await server.request(version)
    assert server.swaps == [A, A, None, None]


@simulated
async def test_what_is_on_its_way_while_weights_are_dropped_is_served() -> None:
    server = Server()
    coming = asyncio.create_task(server.weights.offer(A))
    await asyncio.sleep(0)
    assert server.weights.swapping
    assert server.weights.drop()
    await coming
    assert server.weights.resident == A


@simulated
async def test_a_request_that_is_given_up_leaves_its_swap_to_end() -> None:
    server = Server()
    given_up = asyncio.create_task(server.request(A))
    await asyncio.sleep(0)
    await end(given_up)
    await server.request(A)
    await server.request(None)
    assert server.swaps == [A, None]


async def offered(server: Server, source: SampleSource) -> bool:
    await server.weights.offer(source)
    return source is not None and server.weights.resident == newest(source)


@simulated
async def test_new_weights_come_at_once_to_samplers_that_nobody_uses() -> None:
    server = Server()
    assert await offered(server, A)
    await server.request(A)
    async with server.hold(None):
        assert not await offered(server, B)
    assert server.swaps == [A, None]


@simulated
async def test_weights_of_a_target_are_renewed_under_its_running_requests() -> None:
    server, target, end = Server(), InflightTarget(ModelKey(1), A), asyncio.Event()
    running = [asyncio.create_task(server.rollout(target, end)) for _ in range(3)]
    await server.until_rollouts(3)
    for version in (B, C):
        target.version = version
        assert await offered(server, target)
    end.set()
    assert await asyncio.gather(*running) == [C, C, C]
    assert server.swaps == [A, B, C]


@simulated
async def test_a_newcomer_of_a_target_never_sees_less_than_its_version() -> None:
    """Also when the announcement comes late or never."""
    server, target, end = Server(), InflightTarget(ModelKey(1), A), asyncio.Event()
    first = asyncio.create_task(server.rollout(target, end))
    await server.until_rollouts(1)
    target.version = B
    second = asyncio.create_task(server.rollout(target, end))
    await asyncio.sleep(0.01)
    end.set()
    assert await asyncio.gather(first, second) == [B, B]


@simulated
async def test_a_pinned_version_and_the_base_wait_for_the_requests_of_a_target() -> None:
    server, target, end = Server(), InflightTarget(ModelKey(1), A), asyncio.Event()
    rollout = asyncio.create_task(server.rollout(target, end))
    await server.until_rollouts(1)
    others = [asyncio.create_task(server.request(version)) for version in (A, None, B)]
    await asyncio.sleep(0.01)
    target.version = C
    assert await offered(server, target)
    end.set()
    assert await rollout == C
    await asyncio.gather(*others)
    assert server.swaps == [A, C, A, None, B]


@simulated
async def test_a_renewal_that_fails_leaves_requests_on_the_old_weights() -> None:
    server, target, end = Server(), InflightTarget(ModelKey(1), A), asyncio.Event()
    rollout = asyncio.create_task(server.rollout(target, end))
    await server.until_rollouts(1)
    server.broken, target.version = True, B
    with pytest.raises(SamplerError, match="disk"):
        await server.weights.offer(target)
    server.broken = False
    assert server.weights.in_use(A)
    second = asyncio.create_task(server.rollout(target, end))
    await asyncio.sleep(0.01)
    end.set()
    assert await asyncio.gather(rollout, second) == [B, B]


@simulated
async def test_weights_on_their_way_to_the_samplers_are_in_use() -> None:
    """Files that are being read must not be removed."""
    server = Server()
    request = asyncio.create_task(server.request(A))
    await asyncio.sleep(0)
    assert server.weights.in_use(A)
    assert not server.weights.in_use(B)
    await request
    assert not server.weights.in_use(A)
