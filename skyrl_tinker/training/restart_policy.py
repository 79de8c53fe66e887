"""Restart policy: give up after QUICK_DEATHS deaths before or soon after a start, without work between."""

import time
from collections.abc import Callable

from skyrl_tinker.errors import TrainerError, TrainerLostError

QUICK_S = 60.0
"""Ranks that lived longer did not die quickly."""

QUICK_DEATHS = 3


class RestartPolicy:
    """Policy that ends the trainer only when its ranks die again and again without any work.

    A unit of work that kills the ranks whenever it is tried fails alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born: float | None = clock()  # None: they have not come up since they died
        self._quick = 0

    def born(self) -> None:
        """Record that the ranks are up."""
        self._born = self._clock()

    def worked(self) -> None:
        """Record that a unit has ended, well or not."""
        self._quick = 0

    def died(self, cause: TrainerError) -> None:
        """Record a death. Raises TrainerLostError if there were too many."""
        quick = self._born is None or self._clock() - self._born < QUICK_S
        self._born = None
        self._quick = self._quick + 1 if quick else 1
        if self._quick >= QUICK_DEATHS:
            raise TrainerLostError(
                f"{cause}; that was the {QUICK_DEATHS}rd time, before or within {QUICK_S:.0f} s of a start"
            ) from cause
