"""asample above the backlog: 429, and the SDK comes again with the same seq_id."""

import math

from fastapi import Request

from skyrl_tinker.api.waiting.engine_queues import EngineQueues
from skyrl_tinker.errors import OverloadedError

HEADER = "x-tinker-sampling-backpressure"
"""Sent by clients that take a 429 for a pause. To others it may be an error, or cost them a seq_id."""
LONGEST_S = 60


class Backpressure:
    def __init__(self, queues: EngineQueues, backlog: int) -> None:
        self._queues = queues
        self._backlog = backlog

    def admit(self, request: Request) -> None:
        """Raises OverloadedError while too many samples wait."""
        if HEADER not in request.headers:
            return
        waiting = self._queues.samples_waiting()
        if waiting >= self._backlog:
            raise OverloadedError(
                f"{waiting} samples wait, and the server takes {self._backlog} (setting sample_backlog): "
                "come again when some of them are done",
                self._retry_after(waiting),
            )

    def accepted(self) -> None:
        """One more sample waits."""
        self._queues.sample_accepted()

    def _retry_after(self, waiting: int) -> int:
        """Seconds until there is room, 1 where the pace is not known."""
        pace = self._queues.samples_per_second
        return min(LONGEST_S, max(1, math.ceil((waiting - self._backlog) / pace))) if pace else 1
