"""No request waits for ever: what is stuck fails, and says what it waited for."""

import asyncio
import time
from datetime import UTC, datetime
from itertools import takewhile

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.scheduling.lanes import LaneStatus
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.store.futures.queue import QueuedRow


class Deadlines:
    """Sleeps until the first deadline that can be missed: whatever comes meanwhile has a later one."""

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
        """`gap_s`: how long a model waits for what is missing after the last of its requests came."""
        self._metrics = metrics
        self._trainer = trainer
        self._sampler = sampler
        self._outbox = outbox
        self._request_s = request_s
        self._gap_s = gap_s

    async def run(self) -> None:
        """For ever."""
        while True:
            due = await self.enforce(time.time())
            await asyncio.sleep(max(0.0, due - time.time()))

    async def enforce(self, now: float) -> float:
        """Fail what is due; returns when something may be due again. Times are seconds since the epoch."""
        await self._close_gaps(now)
        await self._expire(now)
        gaps = [stand.since for stand in self._trainer.stands().values() if stand.gap]
        oldest = next(self._metrics.pending(), None)
        return min(
            min(gaps, default=now) + self._gap_s,
            (oldest.created_at if oldest else now) + self._request_s,
        )

    async def _close_gaps(self, now: float) -> None:
        """All at once: while one is answered, what is missing in another may come."""
        stands = self._trainer.stands().items()
        due = {model: stand for model, stand in stands if stand.gap and stand.since + self._gap_s <= now}
        if due:
            await self._trainer.give_up({model: _missing(each, self._gap_s) for model, each in due.items()})

    async def _expire(self, now: float) -> None:
        due = list(takewhile(lambda row: row.created_at + self._request_s <= now, self._metrics.pending()))
        samples = {row.id: self._late_sample() for row in due if row.kind is RequestKind.SAMPLE}
        if samples:
            await self._sampler.end(samples)
        stands = self._trainer.stands()
        training = [(row, self._late(row, stands.get(row.model_key))) for row in due if row.model_key]
        if training:
            await self._trainer.expire(training)

    def _late_sample(self) -> Failure:
        return Failure(
            f"this sample {self._waited}: more is asked of the samplers than they can do", "server"
        )

    def _late(self, row: QueuedRow, stand: LaneStatus | None) -> Failure:
        """`stand`: of its model, None where nothing waits."""
        if stand is None or row.seq_id is None or row.seq_id < stand.next_seq:
            return Failure(
                f"this {row.kind} {self._waited}: it has begun and may still take effect", "server"
            )
        if stand.gap:
            return _missing(stand, self._request_s)
        return Failure(f"this {row.kind} {self._waited}: it never had its turn on the trainer", "server")

    @property
    def _waited(self) -> str:
        return f"was not done within {self._request_s:g} s (setting request_deadline_s)"


def _missing(stand: LaneStatus, waited_s: float) -> Failure:
    since = datetime.fromtimestamp(stand.since, UTC).isoformat(timespec="seconds")
    return Failure(
        f"seq {stand.next_seq} of this model never came: {stand.lowest} is here, and nothing more came for "
        f"{waited_s:g} s since {since}. Requests of a model run in order, so no other one of it will: "
        "make a new model, from the last checkpoint if there is one",
        "user",
    )
