"""Threads for work on large bodies, which would block the event loop for too long."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

OFF_LOOP_BYTES = 64 * 1024

T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return `work()`, run in a thread when `size` bytes of input would block the loop for too long."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()
