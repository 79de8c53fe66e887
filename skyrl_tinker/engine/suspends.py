"""Suspends of the machine: hours in which no client could send anything."""

import time

SUSPENDED_S = 30.0
"""Advance of wall clock over monotonic clock from which the machine counts as having been suspended."""


class Suspends:
    def __init__(self) -> None:
        self._offset_s = _offset_s()

    def noticed(self) -> bool:
        """Return whether the machine was suspended since the last call."""
        advance_s = _offset_s() - self._offset_s
        self._offset_s += advance_s
        return advance_s > SUSPENDED_S


def _offset_s() -> float:
    """Return wall clock minus monotonic clock, which stands still while the machine is suspended."""
    return time.time() - time.monotonic()
