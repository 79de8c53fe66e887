"""Work on disk and work of requests do not wait for each other's threads."""

import asyncio
import threading

from skyrl_tinker.off_loop import DISK_THREADS, OFF_LOOP_BYTES, in_disk_thread, off_loop
from tests.support.waiting import PATIENCE_S


async def test_a_slow_disk_holds_up_no_request() -> None:
    go_on = threading.Event()
    writes = [asyncio.create_task(in_disk_thread(go_on.wait)) for _ in range(10 * DISK_THREADS)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await off_loop(OFF_LOOP_BYTES + 1, lambda: 7) == 7
        assert not any(write.done() for write in writes)
    finally:
        go_on.set()
    await asyncio.gather(*writes)
