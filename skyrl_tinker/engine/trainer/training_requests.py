"""Training requests of one base model that wait: accepted, counted, and failed where they cannot run."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import orjson
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, RequestKind
from skyrl_tinker.domain.values import BaseModelFacts, Failure
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.trainer.model_lifecycle import UNLOADED, ModelLifecycle
from skyrl_tinker.store.futures import outcomes
from skyrl_tinker.store.futures.finish import FutureOutcome
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store


@dataclass(eq=False)
class TrainingRequests:
    """Training requests on their way to the lanes. `woken`: set when there may be work."""

    _store: Store
    lanes: Lanes
    _models: ModelLifecycle
    facts: BaseModelFacts
    _outbox: Outbox
    _metrics: Metrics
    _woken: asyncio.Event

    def __post_init__(self) -> None:
        self.occupancy = self._metrics.occupancy(self.facts.name)
        self.paused: str | None = None
        """Why nothing is trained, for the requests that wait."""
        self._refusal: str | None = None  # why they fail

    async def submit(self, rows: Sequence[QueuedRow]) -> None:
        """Accept training requests in the order of their arrival."""
        failed = [row for row in rows if row.status is FutureStatus.FAILED]
        refusals = await self._store.read(partial(_refusals, rows=failed)) if failed else {}
        ended = await self._models.closed({model_of(row) for row in rows})
        self._metrics.arrived(rows)  # no other task runs between this and the lanes
        refused: list[tuple[int, FutureOutcome]] = []
        for row in rows:
            closed = ended.get(model_of(row))
            if row.kind is RequestKind.UNLOAD_MODEL:
                self._models.unload(row)
            elif closed is None and self.lanes.ended(row):
                refused.append((row.id, UNLOADED))
            elif closed is None:
                self.lanes.add(row, refusals.get(row.id))
            elif row.status is FutureStatus.PENDING:
                refused.append((row.id, closed))
        await self._outbox.send(refused)
        self.occupancy.work_came()
        self._woken.set()
        if self._refusal is not None:
            await self.refuse(self._refusal)

    async def expire(self, late: Sequence[tuple[QueuedRow, Failure]]) -> None:
        """Fail requests that waited too long; later ones go on, as after any failed request."""
        for row, failure in late:
            if row.seq_id:
                self.lanes.expire(row, failure.message)
        begun = {row.id for row, _ in late if not self.lanes.waits(row)}  # these may have taken effect
        await self._outbox.send(
            ((row.id, failure) for row, failure in late if row.seq_id != 0), replayed=begun
        )
        for row, failure in late:
            if row.seq_id == 0:
                model = await self._models.row(model_of(row))
                if await self._models.fail_creation(row, model, failure):
                    self._models.release(model.key)  # its creation may have begun: release it later
        self._woken.set()

    async def give_up(self, failures: Mapping[ModelKey, Failure]) -> None:
        """Fail all requests of these models, waiting and future ones."""
        await self._models.give_up(failures)
        self._woken.set()

    def release(self, model: ModelKey) -> None:
        """Release a model whose session is over, once it has no runnable requests left."""
        self._models.release(model)
        self._woken.set()

    @property
    def asked(self) -> bool:
        """True while any request needs ranks for its result."""
        return any(True for _ in self._pending())

    def _pending(self) -> Iterator[QueuedRow]:
        for row in self._metrics.pending():
            needs_ranks = row.model_key is not None and row.kind is not RequestKind.UNLOAD_MODEL
            if needs_ranks and row.base_model in self.facts.names:
                yield row

    async def refuse(self, why: str) -> None:
        """Fail the requests of these models, and later ones until `accept`: there are no ranks for them."""
        self._refusal = why
        begun = Failure(f"{why}; this request has begun and may still take effect", "server")
        waiting = Failure(f"{why}; other base models are unaffected", "server")
        late = [(row, waiting if self.lanes.waits(row) else begun) for row in self._pending()]
        await self.expire(late)

    def accept(self) -> None:
        """Take requests, as there are ranks for them."""
        self.paused = self._refusal = None


def _refusals(conn: Connection, rows: Sequence[QueuedRow]) -> dict[int, str]:
    found = {row.id: outcomes.find(conn, row.request_id) for row in rows}
    return {
        future_id: str(orjson.loads(outcome.body)["error"])
        for future_id, outcome in found.items()
        if outcome and outcome.body
    }
