"""Backpressure: samples above the backlog of their base model get a 429, and clients try them again."""

import math

from skyrl_tinker.api.waiting.engine_queues import EngineQueues
from skyrl_tinker.errors import OverloadedError

LONGEST_S = 60


class Backpressure:
    def __init__(self, queues: EngineQueues, backlog: int) -> None:
        self._queues = queues
        self._backlog = backlog

    def full(self, base_model: str) -> OverloadedError | None:
        """Return the refusal of one more sample of a base model, None while there is room."""
        waiting = self._queues.samples_waiting(base_model)
        if waiting < self._backlog:
            return None
        return OverloadedError(
            f"{waiting} samples of {base_model} are waiting, and the server accepts {self._backlog} "
            "(setting sample_backlog): send this request again later",
            self._retry_after(base_model, waiting),
        )

    def accepted(self, base_model: str) -> None:
        """Count one more waiting sample."""
        self._queues.sample_accepted(base_model)

    def _retry_after(self, base_model: str, waiting: int) -> int:
        """Estimate the seconds until the backlog is short enough; 1 while the throughput is unknown."""
        rate = self._queues.samples_per_second(base_model)
        return min(LONGEST_S, max(1, math.ceil((waiting - self._backlog) / rate))) if rate else 1
