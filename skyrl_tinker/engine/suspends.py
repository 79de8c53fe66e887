"""Suspends of the machine, during which no client could send anything."""

import time
from collections.abc import Callable

SUSPENDED_S = 30.0
"""Advance of wall clock over monotonic clock from which the machine counts as having been suspended.

The database's clock may be ahead after a takeover by another host: such a jump is not clients' time either.
"""


class Suspends:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: of the compared times, in seconds since the epoch."""
        self._clock = clock
        self._offset_s = self._offset()

    def noticed(self) -> bool:
        """Return whether the machine was suspended since the last call."""
        advance_s = self._offset() - self._offset_s
        self._offset_s += advance_s
        return advance_s > SUSPENDED_S

    def _offset(self) -> float:
        """Return wall clock minus monotonic clock, which stops while the machine is suspended."""
        return self._clock() - time.monotonic()
