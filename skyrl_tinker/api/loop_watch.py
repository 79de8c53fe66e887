"""Watch over blocks of this process's event loop."""

import asyncio
import time
from collections.abc import Callable

BEAT_S = 0.01


class LoopWatch:
    """Task that wakes every BEAT_S and reports how late it was: a block, less at most BEAT_S."""

    def __init__(self, report: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`report`: called with the seconds at each beat."""
        self._report = report
        self._clock = clock

    async def run(self) -> None:
        """Measure until cancelled."""
        before = self._clock()
        while True:
            await asyncio.sleep(BEAT_S)
            now = self._clock()
            self._report(max(0.0, now - before - BEAT_S))
            before = now
