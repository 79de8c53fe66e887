"""Recent speed of work, for the estimates that waiting clients get."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from skyrl_tinker.store.futures.queue import QueuedRow

UNITS = 16
ENDS, ENDS_S = 1024, 60.0
"""Most completions that are kept, and for how many seconds."""


class UnitTimes:
    """Durations of the last units of work. `running`: the rows of the unit that runs."""

    def __init__(self) -> None:
        self.running: Sequence[QueuedRow] = ()
        self._durations: deque[float] = deque(maxlen=UNITS)

    @contextmanager
    def unit(self, rows: Sequence[QueuedRow]) -> Iterator[None]:
        began, self.running = time.monotonic(), rows
        try:
            yield
        finally:
            self.running = ()
            self._durations.append(time.monotonic() - began)

    def seconds(self) -> float | None:
        """Return the mean duration of the last units; None before the first."""
        return sum(self._durations) / len(self._durations) if self._durations else None


class EndRate:
    """Completions per second of work that runs concurrently."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=ENDS)

    def record(self) -> None:
        self._times.append(time.monotonic())

    def per_second(self) -> float | None:
        """Return the recent rate; None when nothing ended."""
        now = time.monotonic()
        recent = [at for at in self._times if at > now - ENDS_S]
        return len(recent) / (now - recent[0]) if recent and now > recent[0] else None
