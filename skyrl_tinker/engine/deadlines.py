"""Deadlines of requests: a stuck request fails with a message that names the cause of its wait."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.bases.train_dispatch import TrainDispatch
from skyrl_tinker.engine.gaps import Gaps
from skyrl_tinker.engine.suspends import Suspends
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.protocol.queue_views import LaneView
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store

_UNLIMITED = frozenset({RequestKind.CANCEL_SAMPLE, RequestKind.UNLOAD_MODEL})
LOOK_S = 0.5


@dataclass(eq=False)
class Deadlines:
    """Fails late requests, and missing ones that others wait for."""

    _store: Store
    _metrics: Metrics
    _trainer: TrainDispatch
    _samples: SampleDispatch
    _gaps: Gaps
    _request_s: float

    def __post_init__(self) -> None:
        self._suspends = Suspends(self._store.now)
        self._resumed_at = 0.0

    async def run(self) -> None:
        """Enforce deadlines indefinitely."""
        while True:
            await self.enforce(self._store.now())
            await asyncio.sleep(LOOK_S)

    async def enforce(self, now: float) -> None:
        """Fail late requests. `now`: seconds since the epoch."""
        await self._gaps.close(now)
        await self._expire(now)

    def _limited(self) -> Iterator[QueuedRow]:
        """Iterate over the requests that have a deadline, the oldest first.

        Cancellations and unloads have none: they wait for other requests, which have deadlines.
        """
        return (row for row in self._metrics.pending() if row.kind not in _UNLIMITED)

    async def _expire(self, now: float) -> None:
        if self._suspends.noticed():
            self._resumed_at = max(now, self._store.now())  # `now` was read before the gaps were closed
        if now - self._resumed_at < self._request_s:
            return
        due = list(takewhile(lambda row: row.created_at + self._request_s <= now, self._limited()))
        if not due:
            return
        late = Failure(f"this sample {self._waited}: the samplers are overloaded", "server")
        if samples := {row.id: late for row in due if row.kind is RequestKind.SAMPLE}:
            await self._samples.end(samples)
        lanes = self._trainer.lane_statuses()
        if training := [(row, self._late(row, lanes.get(row.model_key))) for row in due if row.model_key]:
            await self._trainer.expire(training)

    def _late(self, row: QueuedRow, lane: LaneView | None) -> Failure:
        """Return the failure of a late training request. `lane`: its model's, None if nothing waits in it."""
        if lane is None or (row.seq_id or 0) < lane.next_seq:
            return Failure(
                f"this {row.kind} {self._waited}: it has begun and may still take effect", "server"
            )
        return Failure(f"this {row.kind} {self._waited}: it never started on the trainer", "server")

    @property
    def _waited(self) -> str:
        return f"was not done within {self._request_s:g} s (setting timeouts.request_s)"
