"""Longest block of this process's event loop."""

import asyncio
import time

BEAT_S = 0.01


class LoopWatch:
    """Task that wakes every BEAT_S and records the longest delay."""

    def __init__(self) -> None:
        self._longest = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            self._longest = max(self._longest, now - before)
            before = now

    def longest_s(self) -> float:
        """Return the longest time between two beats since the last call: the block, plus at most BEAT_S."""
        longest, self._longest = self._longest, 0.0
        return longest
