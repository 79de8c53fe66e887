"""Threads for work that would block the event loop: of requests (kept hot), disk, transfers, loads, recovery.

They are apart so that no fsync of one tenant delays a pass of another, no upload a look for a file, and no
number of loads, copies and exports a save, a snapshot, or the return of a model. Nor do those of one tenant
take all threads from the loads of others.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from skyrl_tinker.system.turns import Turns

OFF_LOOP_BYTES = 64 * 1024
DISK_THREADS, TRANSFER_THREADS, LOAD_THREADS, RECOVERY_THREADS = 4, 16, 8, 8

T = TypeVar("T")
_disk = ThreadPoolExecutor(DISK_THREADS, "disk")
_transfers = ThreadPoolExecutor(TRANSFER_THREADS, "transfer")
_loads = ThreadPoolExecutor(LOAD_THREADS, "load")
_recovery = ThreadPoolExecutor(RECOVERY_THREADS, "recovery")
_load_turns = Turns(LOAD_THREADS // 2)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return `work()`, run in a hot thread when `size` bytes of input would block the loop for too long."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()


async def in_disk_thread(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `work(*args, **kwargs)`, which looks for, writes or removes files of this host, in a moment."""
    return await asyncio.get_running_loop().run_in_executor(_disk, partial(work, *args, **kwargs))


async def in_transfer_thread(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `work(*args, **kwargs)`, which stores checkpoints or asks the network: it may take long."""
    return await asyncio.get_running_loop().run_in_executor(_transfers, partial(work, *args, **kwargs))


async def in_load_thread(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `work(*args, **kwargs)`, which fetches, copies or exports weights for a client."""
    return await asyncio.get_running_loop().run_in_executor(_loads, partial(work, *args, **kwargs))


async def in_load_turn(share: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return `await work()`, which takes a load thread, in a turn of a share: of each half of them at once.

    None, the engine itself or the one user of a server without keys, has no turns.
    """
    return await (work() if share is None else _load_turns.run(share, work))


async def in_recovery_thread(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `work(*args, **kwargs)`, which fetches the files of a model that comes back."""
    return await asyncio.get_running_loop().run_in_executor(_recovery, partial(work, *args, **kwargs))
