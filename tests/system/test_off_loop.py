"""Transfers, work on disk and work of requests do not wait for each other's threads."""

import asyncio
import threading
from functools import partial

from skyrl_tinker.system.off_loop import (
    DISK_THREADS,
    LOAD_THREADS,
    OFF_LOOP_BYTES,
    TRANSFER_THREADS,
    in_disk_thread,
    in_load_thread,
    in_load_turn,
    in_transfer_thread,
    off_loop,
)
from tests.support.waiting import holding, until


async def test_a_slow_disk_holds_up_no_request_and_a_slow_network_neither() -> None:
    disk, network, writes = threading.Event(), threading.Event(), list[asyncio.Task[bool]]()
    transfers = [asyncio.create_task(in_transfer_thread(network.wait)) for _ in range(10 * TRANSFER_THREADS)]
    async with holding(network, transfers), holding(disk, writes):
        assert await in_disk_thread(lambda: 7) == 7
        writes += [asyncio.create_task(in_disk_thread(disk.wait)) for _ in range(10 * DISK_THREADS)]
        await asyncio.sleep(0)
        assert await off_loop(OFF_LOOP_BYTES + 1, lambda: 7) == 7
        assert not any(each.done() for each in (*transfers, *writes))


async def test_however_many_loads_wait_a_save_finds_a_thread() -> None:
    storage = threading.Event()
    loads = [asyncio.create_task(in_load_thread(storage.wait)) for _ in range(2 * TRANSFER_THREADS)]
    async with holding(storage, loads):
        assert await in_transfer_thread(lambda: 7) == 7


async def test_however_much_one_share_loads_another_finds_a_thread() -> None:
    storage, begun = threading.Event(), list[int]()

    def load(number: int) -> None:
        begun.append(number)
        storage.wait()

    def asked(share: str | None, first: int) -> "list[asyncio.Task[None]]":
        return [
            asyncio.create_task(in_load_turn(share, partial(in_load_thread, load, number)))
            for number in range(first, first + LOAD_THREADS)
        ]

    loads = asked("a", 0)
    async with holding(storage, loads):
        assert await in_load_turn("b", partial(in_load_thread, lambda: 7)) == 7
        assert begun == [*range(LOAD_THREADS // 2)]
        loads += asked(None, 100)
        await until(lambda: len(begun) == LOAD_THREADS)
