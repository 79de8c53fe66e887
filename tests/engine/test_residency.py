"""Requests run only on the weights they ask for, grouped, and every group gets its turn."""

import asyncio

import pytest

from skyrl_tinker.engine.residency import Residency
from skyrl_tinker.wire.ids import VersionId
from skyrl_tinker.wire.values import WeightVersion

A, B = (WeightVersion(VersionId(number), "full", f"/weights/{number}") for number in (1, 2))


class Server:
    """Holds one version; `swaps` is the order in which they came in."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        self.swaps: list[WeightVersion | None] = []
        self.busy = 0
        self.broken = False
        self.residency = Residency(self.swap)

    async def swap(self, version: WeightVersion | None) -> None:
        assert self.busy == 0, "swapped under a request"
        await asyncio.sleep(0)
        if self.broken:
            raise OSError("disk")
        self.version = version
        self.swaps.append(version)

    async def request(self, version: WeightVersion | None) -> None:
        async with self.residency.hold(version):
            assert self.version == version
            self.busy += 1
            await asyncio.sleep(0.001)
            assert self.version == version
            self.busy -= 1


async def test_the_base_needs_no_swap() -> None:
    server = Server()
    await asyncio.gather(*(server.request(None) for _ in range(5)))
    assert server.swaps == []


async def test_many_waiting_requests_of_a_version_share_its_swap() -> None:
    server = Server()
    await asyncio.gather(*(server.request(version) for version in (A, None) * 20))
    assert server.swaps == [A, None, A]  # the first A found nobody waiting; the others came behind the base


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


async def test_groups_take_turns_under_a_steady_stream() -> None:
    server = Server()

    async def stream(version: WeightVersion | None) -> None:
        for _ in range(20):
            await server.request(version)

    await asyncio.gather(*(stream(version) for version in (None, A, B) for _ in range(3)))
    assert len(server.swaps) >= 20


async def test_a_failed_swap_fails_its_requests_only() -> None:
    server = Server()
    server.broken = True
    with pytest.raises(OSError, match="disk"):
        await server.request(A)
    await server.request(None)
    server.broken = False
    await server.request(A)
    assert server.swaps == [A]


async def test_after_a_restart_the_weights_are_brought_again() -> None:
    server = Server()
    await server.request(A)
    server.version = None
    server.residency.forget()
    await server.request(A)
    assert server.swaps == [A, A]
