"""Life of the models in training: opened, created, parked, released or unloaded.

A model that ends leaves the ranks immediately. Its end is committed after the units that it ran, and before
any later replay; its files are removed after that, during training.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelKey, ModelState
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.outbox import Outbox, json_answer, persistently
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.recovery import parking
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.unit_commits import UnitCommits, UnitEnd
from skyrl_tinker.redaction import without_paths
from skyrl_tinker.store import model_records
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.finish import FutureOutcome
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup

SESSION_OVER = Failure("the session of this model is finished; its training state is released", "user")
UNLOADED = Failure("this model was unloaded, as its client asked (unload_model)", "user")
PARKED_AT_ONCE = 64
"""Most models in one commit, for which other writes wait."""
_log = logging.getLogger(__name__)
Start = Callable[[Coroutine[Any, Any, Any]], object]
"""Start work in the background."""


@dataclass(eq=False)
class ModelLifecycle:
    """Opens and closes the lanes of models, and ends models.

    `names`: of the base model.
    """

    _store: Store
    _trainer: TrainerGroup
    _lanes: Lanes
    _drift_monitor: DriftMonitor
    _snapshots: SnapshotKeeper
    _outbox: Outbox
    _commits: UnitCommits
    _names: Collection[str]

    def __post_init__(self) -> None:
        self._releasing: set[ModelKey] = set()  # models whose sessions are over
        self._unloading: dict[ModelKey, QueuedRow] = {}  # by model, its unload_model request

    async def open_ready(self) -> dict[ModelKey, int]:
        """Open the lanes of the models that an earlier engine had in training, each where it stopped.

        Returns their next seq_ids.
        """
        states = await persistently(self._store.fetch, partial(_resumed, names=self._names))
        for model, (next_seq, window_error) in states.items():
            self._lanes.open(model, next_seq, window_error)
        return {model: next_seq for model, (next_seq, _) in states.items()}

    async def row(self, model: ModelKey) -> ModelRow:
        return await persistently(self._store.read, lambda conn: model_records.by_key(conn, model))

    async def closed(self, models: Collection[ModelKey]) -> dict[ModelKey, Failure]:
        """Return the failures of the models that have ended; open lanes for those new to this engine."""
        ended: dict[ModelKey, Failure] = {}
        while new := [model for model in models if model not in ended and not self._lanes.knows(model)]:
            for model in new:  # first, so that a model's end during the query closes its lane
                self._lanes.open(model)
            for row in await persistently(self._store.read, partial(_rows, models=new)):
                if row.state is not ModelState.CREATING:
                    ended[row.key] = _failure_of(row)
                    self._lanes.close(row.key, ended[row.key])
                    self._lanes.forget(row.key)
        closed = {model: self._lanes.closed_by(model) for model in models}
        return ended | {model: failure for model, failure in closed.items() if failure is not None}

    async def fail_creation(self, row: QueuedRow, model: ModelRow, failure: Failure) -> bool:
        """Fail a creation and every request that waits for it; returns False if the model has just ended."""
        creating = (ModelState.CREATING,)
        if failed := await self._fail(model.key, creating, failure.message, [(row.id, failure)]):
            waiting = Failure(f"model {model.model_id} was not created: {failure.message}", failure.category)
            await self._outbox.send(self._close(model.key, waiting))
            self._lanes.forget(model.key)
        return failed

    async def give_up(self, failures: Mapping[ModelKey, Failure]) -> None:
        """End these models, and fail all their requests, waiting and future ones.

        A model that has just been parked or has ended stays so.
        """
        training = (ModelState.CREATING, ModelState.READY)
        for model, failure in failures.items():
            if await self._fail(model, training, failure.message):
                await self._outbox.send(self._close(model, failure))
                self.release(model)

    async def _fail(
        self,
        model: ModelKey,
        was: Collection[ModelState],
        reason: str,
        outcomes: Iterable[tuple[int, FutureOutcome]] = (),
    ) -> bool:
        """Record that a model in one of the states `was` has failed; returns whether it was in one."""
        failed = False

        def op(conn: Connection) -> None:
            nonlocal failed
            failed = model_records.set_state(conn, model, ModelState.FAILED, reason, was=was)

        self._lanes.hold(model)  # it may become ready meanwhile
        await self._outbox.send(outcomes, op)
        if not failed:
            self._lanes.resume(model)
        return failed

    def unload(self, row: QueuedRow) -> None:
        """Release a model at its client's request, once all requests before this one have run."""
        self._unloading[model_of(row)] = row
        self._lanes.end(model_of(row))

    def release(self, model: ModelKey) -> None:
        """Release a model whose session is over, once it has no runnable requests left."""
        self._releasing.add(model)

    async def retire(self, start: Start) -> None:
        """Release the models that are due and have no runnable requests left.

        `start`: starts work in the background.
        """
        over = {model: SESSION_OVER for model in self._releasing if not self._lanes.runnable(model, 1)}
        unloaded = {model: UNLOADED for model in self._unloading if self._lanes.drained(model)}
        for model, failure in {**unloaded, **over}.items():
            if not self._lanes.under_way(model):
                start(self._remove(model, await self._release(model, failure)))

    async def park(self, causes: Mapping[ModelKey, str]) -> None:
        """Close models that cannot be brought back now. The files for a later recovery are kept."""
        again = "it is tried again when the server is started again"
        told = {model: f"{without_paths(cause)}; {again}" for model, cause in causes.items()}
        for model, cause in causes.items():
            _log.error("model %s cannot be brought back: %s", model, cause)
            await self._drift_monitor.forget(model)
            await self._trainer.release(model)
            self._snapshots.pause(model)
        for first in range(0, len(causes), PARKED_AT_ONCE):
            await self._park(dict(islice(told.items(), first, first + PARKED_AT_ONCE)))

    async def _park(self, causes: Mapping[ModelKey, str]) -> None:
        """Park models in one commit: all may have to be, as those on a lost disk."""
        failures = await persistently(self._store.fetch, partial(_why_parked, causes=causes))
        for model, failure in failures.items():
            self._close(model, failure)
        pending = await persistently(self._store.fetch, partial(_pending, failures=failures))
        ops = [
            partial(model_records.set_state, key=model, state=ModelState.PARKED, reason=failure.message)
            for model, failure in failures.items()
        ]
        await self._outbox.send(pending, *ops)
        for model in failures:
            self._lanes.forget(model)

    async def _release(self, model: ModelKey, failure: Failure) -> "asyncio.Future[None]":
        """Release a model; returns a future that is done once this is committed."""
        self._releasing.discard(model)
        failure = self._lanes.closed_by(model) or failure
        await self._trainer.release(model)
        outcomes = self._close(model, failure)
        if request := self._unloading.pop(model, None):
            outcomes.append((request.id, json_answer({"model_id": (await self.row(model)).model_id})))
        self._snapshots.pause(model)
        released = ModelState.RELEASED
        end = partial(model_records.set_state, key=model, state=released, reason=failure.message)
        return self._commits.add(UnitEnd(dict(outcomes), (end,)))

    async def _remove(self, model: ModelKey, committed: "asyncio.Future[None]") -> None:
        """Remove a model's files and records, once its end is committed."""
        await committed
        self._lanes.forget(model)
        await self._drift_monitor.forget(model)
        await self._snapshots.forget(model)

    def _close(self, model: ModelKey, failure: Failure) -> list[tuple[int, FutureOutcome]]:
        """Close a lane; returns the failures of the requests that waited in it, by future id."""
        return [(row.id, failure) for row in self._lanes.close(model, failure)]


def _resumed(conn: Connection, names: Collection[str]) -> dict[ModelKey, tuple[int, str | None]]:
    """Return next seq_id and window error of each model in training of a base model."""
    models = model_records.list_ready(conn, names)
    return {
        model.key: (unit_records.next_seq(conn, model.key), unit_records.window_error(conn, model.key))
        for model in models
    }


def _why_parked(conn: Connection, causes: Mapping[ModelKey, str]) -> dict[ModelKey, Failure]:
    rows = {model: model_records.by_key(conn, model) for model in causes}
    return {
        model: Failure(parking.why_parked(conn, row, causes[model]), "server") for model, row in rows.items()
    }


def _pending(conn: Connection, failures: Mapping[ModelKey, Failure]) -> list[tuple[int, Failure]]:
    """Return the failures of all requests of models that end, including saves that had begun."""
    return [
        (future_id, failure)
        for model, failure in failures.items()
        for future_id in queue.pending_of(conn, model)
    ]


def _rows(conn: Connection, models: Sequence[ModelKey]) -> list[ModelRow]:
    return [model_records.by_key(conn, model) for model in models]


def _failure_of(model: ModelRow) -> Failure:
    """Return the failure for requests of a model that cannot be trained any more."""
    reason = model.state_reason or f"model {model.model_id} is {model.state}"
    return Failure(reason, "server" if model.state in (ModelState.PARKED, ModelState.LOST) else "user")
