"""Work that grows with a body's size, kept off the event loop where it would hold it too long."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

OFF_LOOP_BYTES = 64 * 1024

T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return `work()`, run in a thread when `size` bytes of input would hold the loop too long."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()
