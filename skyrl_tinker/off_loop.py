"""Threads for what would block the event loop: hot ones for requests, others for work on disk.

They are apart so that no fsync or copy of one tenant delays a pass of another.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

OFF_LOOP_BYTES = 64 * 1024
DISK_THREADS = 4

T = TypeVar("T")
_disk = ThreadPoolExecutor(DISK_THREADS, "disk")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return `work()`, run in a hot thread when `size` bytes of input would block the loop for too long."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()


async def in_disk_thread(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `work(*args, **kwargs)`, which reads, writes or removes files."""
    return await asyncio.get_running_loop().run_in_executor(_disk, partial(work, *args, **kwargs))
