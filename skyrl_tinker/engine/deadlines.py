"""Deadlines of requests: what is stuck fails with a message that names what it waited for."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import takewhile

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.scheduling.lanes import LaneStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.store.futures.queue import QueuedRow

_UNLIMITED = frozenset({RequestKind.CANCEL_SAMPLE, RequestKind.UNLOAD_MODEL})


class Deadlines:
    """Fails late requests; sleeps until the next deadline, since those of new requests are later."""

    def __init__(
        self,
        metrics: Metrics,
        trainer: TrainerDriver,
        sampler: SamplerDriver,
        outbox: Outbox,
        *,
        request_s: float,
        gap_s: float,
    ) -> None:
        """`gap_s`: how long a model waits for a missing request after the last one came.

        The time before this engine does not count: clients could not send it.
        """
        self._began = time.time()
        self._metrics = metrics
        self._trainer = trainer
        self._sampler = sampler
        self._outbox = outbox
        self._request_s = request_s
        self._gap_s = gap_s

    async def run(self) -> None:
        """Enforce deadlines indefinitely."""
        while True:
            due = await self.enforce(time.time())
            await asyncio.sleep(max(0.0, due - time.time()))

    async def enforce(self, now: float) -> float:
        """Fail late requests; returns when the next may be late. Times are in seconds since the epoch."""
        await self._close_gaps(now)
        await self._expire(now)
        gaps = [self._gap_ends(lane) for lane in self._trainer.lane_statuses().values() if lane.gap]
        oldest = next(self._limited(), None)
        return min(
            min(gaps, default=now + self._gap_s),
            (oldest.created_at if oldest else now) + self._request_s,
        )

    def _gap_ends(self, lane: LaneStatus) -> float:
        return max(lane.since, self._began) + self._gap_s

    async def _close_gaps(self, now: float) -> None:
        """Give up all such models at once: awaiting one by one, a gap found here may close meanwhile."""
        lanes = self._trainer.lane_statuses().items()
        due = {model: lane for model, lane in lanes if lane.gap and self._gap_ends(lane) <= now}
        if due:
            await self._trainer.give_up({model: _missing(lane, self._gap_s) for model, lane in due.items()})

    def _limited(self) -> Iterator[QueuedRow]:
        """Iterate over the requests that have a deadline, the oldest first.

        Cancellations and unloads have none: they wait for others, which have.
        """
        return (row for row in self._metrics.pending() if row.kind not in _UNLIMITED)

    async def _expire(self, now: float) -> None:
        due = list(takewhile(lambda row: row.created_at + self._request_s <= now, self._limited()))
        samples = {row.id: self._late_sample() for row in due if row.kind is RequestKind.SAMPLE}
        if samples:
            await self._sampler.end(samples)
        lanes = self._trainer.lane_statuses()
        training = [(row, self._late(row, lanes.get(row.model_key))) for row in due if row.model_key]
        if training:
            await self._trainer.expire(training)

    def _late_sample(self) -> Failure:
        return Failure(f"this sample {self._waited}: the samplers are overloaded", "server")

    def _late(self, row: QueuedRow, lane: LaneStatus | None) -> Failure:
        """Return the failure of a late training request. `lane`: its model's, None where nothing waits."""
        if lane is None or (row.seq_id or 0) < lane.next_seq:
            return Failure(
                f"this {row.kind} {self._waited}: it has begun and may still take effect", "server"
            )
        if lane.gap:
            return _missing(lane, self._request_s)
        return Failure(f"this {row.kind} {self._waited}: it never started on the trainer", "server")

    @property
    def _waited(self) -> str:
        return f"was not done within {self._request_s:g} s (setting request_deadline_s)"


def _missing(lane: LaneStatus, waited_s: float) -> Failure:
    since = datetime.fromtimestamp(lane.since, UTC).isoformat(timespec="seconds")
    return Failure(
        f"seq {lane.next_seq} of this model did not arrive: the server has {lane.lowest}, and received "
        f"nothing more for {waited_s:g} s since {since}. Requests of a model run in order, so no later one "
        "can run: make a new model, from the last checkpoint if there is one",
        "user",
    )
