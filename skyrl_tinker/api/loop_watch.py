"""How long the event loop of this process was blocked, at most."""

import asyncio
import time

BEAT_S = 0.01


class LoopWatch:
    """A task that should run every 10 ms, and notes by how much it did not."""

    def __init__(self) -> None:
        self._longest = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            self._longest = max(self._longest, now - before)
            before = now

    def longest_s(self) -> float:
        """The longest time between two beats since this was asked last. No block was longer: one that began
        just after a beat is told up to BEAT_S too long."""
        longest, self._longest = self._longest, 0.0
        return longest
