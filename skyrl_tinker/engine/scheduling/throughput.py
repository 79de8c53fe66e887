"""How fast work has gone lately: what is told to those who wait."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from skyrl_tinker.store.futures.queue import QueuedRow

UNITS = 16
ENDS, ENDS_S = 1024, 60.0
"""How far back it is counted what ended: so many, in this time."""


class UnitTimes:
    """Of units of work, one after another. `running`: the rows of the one that runs."""

    def __init__(self) -> None:
        self.running: Sequence[QueuedRow] = ()
        self._took: deque[float] = deque(maxlen=UNITS)

    @contextmanager
    def unit(self, rows: Sequence[QueuedRow]) -> Iterator[None]:
        began, self.running = time.monotonic(), rows
        try:
            yield
        finally:
            self.running = ()
            self._took.append(time.monotonic() - began)

    def seconds(self) -> float | None:
        """Of the last units on average; None before the first."""
        return sum(self._took) / len(self._took) if self._took else None


class EndRate:
    """Of much that goes on side by side."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=ENDS)

    def one(self) -> None:
        self._at.append(time.monotonic())

    def per_second(self) -> float | None:
        """Lately; None when nothing ended."""
        now = time.monotonic()
        recent = [at for at in self._at if at > now - ENDS_S]
        return len(recent) / (now - recent[0]) if recent and now > recent[0] else None
