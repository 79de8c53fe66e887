"""Training: plans units of work, has the workers run them one after another, and sees to their results."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, ModelState, RequestKind
from skyrl_tinker.domain.values import Failure, PassOutput
from skyrl_tinker.engine import recovery
from skyrl_tinker.engine.colocation.placement import SEPARATE, Placement
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.outbox import Outbox, Outcome, failure_of, json_answer
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.sampler_publisher import Publisher
from skyrl_tinker.engine.saves.sampler_saves import Syncs
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.scheduling.lanes import Lanes, LaneStatus, model_of
from skyrl_tinker.engine.scheduling.planner import Barriers, Pass, Planner, Unit
from skyrl_tinker.engine.scheduling.throughput import UnitTimes
from skyrl_tinker.engine.trainer.model_creation import Finished, ModelCreation
from skyrl_tinker.engine.trainer.optim_steps import OptimSteps
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator, ReadyPass, encode
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.protocol.queue_views import LaneView, TrainingView
from skyrl_tinker.protocol.stored_requests import (
    CreateViaLoadBody,
    LoadWeightsBody,
    SaveExternalBody,
    SaveWeightsBody,
)
from skyrl_tinker.store import model_records
from skyrl_tinker.store.futures import outcomes, queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup

OVER = Failure("the session of this model is finished; its training state is released", "user")
UNLOADED = Failure("this model was unloaded, as its client asked (unload_model)", "user")


class TrainerDriver:
    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        keeper: ModelCreation,
        saver: Saver,
        exporter: Exporter,
        publisher: Publisher,
        outbox: Outbox,
        unit_tokens: int,
        gaps: DriftMonitor,
        metrics: Metrics,
        placement: Placement = SEPARATE,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._models = keeper
        self._saver = saver
        self._exporter = exporter
        self._syncs = Syncs(store, publisher, gaps, outbox)
        self._outbox = outbox
        self._gaps = gaps
        self._metrics = metrics
        self._placement = placement
        self._passes = PassCoordinator(store, trainer)
        self._lanes = Lanes()
        self._steps = OptimSteps(store, trainer, self._lanes, gaps, outbox)
        self._planner = Planner(self._lanes, unit_tokens)
        self._ahead: ReadyPass | None = None
        self._on_workers: set[ModelKey] = set()
        self._leaving: set[ModelKey] = set()
        self._unloading: dict[ModelKey, QueuedRow] = {}  # whose client asked for it
        self._pace = UnitTimes()
        self._woken = asyncio.Event()
        self._background = asyncio.TaskGroup()

    async def submit(self, rows: Sequence[QueuedRow]) -> None:
        """Training requests, in the order of their arrival."""
        refused: list[tuple[int, Outcome]] = []
        for row in rows:
            refusal = await self._refusal(row)
            closed = await self._closed_by(model_of(row))
            if row.kind is RequestKind.UNLOAD_MODEL:
                self._unloading[model_of(row)] = row
                self._lanes.end(model_of(row))
            elif closed is None and self._lanes.ended(row):
                refused.append((row.id, UNLOADED))
            elif closed is None:
                self._lanes.add(row, refusal)
            elif row.status is FutureStatus.PENDING:
                refused.append((row.id, closed))
        await self._outbox.send(refused)
        self._metrics.trainer.work_came()
        self._woken.set()

    def backlog(self) -> int:
        """About how many tokens of passes wait for the workers."""
        return self._lanes.backlog()

    def view(self) -> TrainingView:
        """What waits and how fast it goes."""
        lanes = {
            int(model): LaneView(stand.next_seq, stand.lowest, stand.held, stand.session_id)
            for model, stand in self._lanes.stands().items()
        }
        running = self._pace.running
        models = tuple({model_of(row) for row in running})
        kind = running[0].kind if running else None
        return TrainingView(lanes, self._planner.tenants(), models, kind, self._pace.seconds())

    def stands(self) -> dict[ModelKey, LaneStatus]:
        """Models that have something waiting."""
        return self._lanes.stands()

    async def expire(self, late: Sequence[tuple[QueuedRow, Failure]]) -> None:
        """These have waited too long. What follows them goes on, as behind any request that failed."""
        for row, failure in late:
            if row.seq_id:
                self._lanes.expire(row, failure.message)
        await self._outbox.send((row.id, failure) for row, failure in late if row.seq_id != 0)
        for row, failure in late:
            if row.seq_id == 0:
                await self._single_failed(row, await self._row(model_of(row)), failure)
        self._woken.set()

    async def give_up(self, models: Mapping[ModelKey, Failure]) -> None:
        """Nothing of these runs any more: what waits fails now, and so does all that comes."""
        waiting = [
            (row.id, failure)
            for model, failure in models.items()
            for row in self._lanes.close(model, failure)
        ]
        await self._outbox.send(waiting)
        self._woken.set()

    def reads(self, directory: str) -> bool:
        """Whether a checkpoint's directory is being loaded."""
        return self._models.reads(directory)

    def release(self, model: ModelKey) -> None:
        """Its session is over: let go of it as soon as it has nothing left that can run."""
        self._leaving.add(model)
        self._woken.set()

    async def run(self) -> None:
        """For ever. TrainerError: the workers are broken, and every model with them."""
        async with self._background:
            while True:
                unit = await self._next()
                with self._pace.unit(unit.rows):
                    await self._carry_out(unit)

    async def _closed_by(self, model: ModelKey) -> Failure | None:
        """Why nothing of this model can run. A model that nobody has seen yet gets its lane here."""
        if not self._lanes.knows(model):
            row = await self._row(model)
            if row.state is ModelState.CREATING:
                self._lanes.open(model)
            else:
                self._lanes.close(model, _closed(row))
        return self._lanes.closed_by(model)

    async def _refusal(self, row: QueuedRow) -> str | None:
        """What the API found wrong with a row that arrives as failed."""
        if row.status is not FutureStatus.FAILED:
            return None
        with self._store.read() as conn:
            found = outcomes.find(conn, row.request_id)
        return str(orjson.loads(found.body)["error"]) if found and found.body else None

    async def _row(self, model: ModelKey) -> ModelRow:
        with self._store.read() as conn:
            row = model_records.by_key(conn, model)
        assert row is not None, "futures refer to models"
        return row

    # Planning

    async def _next(self) -> Unit | ReadyPass:
        if self._ahead is not None:
            ready, self._ahead = self._ahead, None
            return ready
        await self._let_go()
        while (unit := self._planner.next()) is None:
            self._metrics.trainer.no_work()
            self._woken.clear()
            await self._woken.wait()
            await self._let_go()
        return unit

    async def _look_ahead(self) -> None:
        """Prepare the next pass while one runs."""
        unit = self._planner.ahead()
        if unit is not None:
            self._ahead = await self._passes.prepare(unit)

    async def _let_go(self) -> None:
        """Of models that are lost, and of those that nobody wants any more."""
        for model in self._trainer.take_lost() & self._on_workers:
            await self._bury(model)
        await self._release_idle()

    async def _bury(self, model: ModelKey) -> None:
        """Its state died with a worker."""
        self._on_workers.discard(model)
        await self._gaps.forget(model)
        with self._store.read() as conn:
            row = model_records.by_key(conn, model)
            assert row is not None, "futures refer to models"
            reason = recovery.why_lost(conn, row, "a trainer process died")
        failure = Failure(reason, "server")
        waiting = self._lanes.close(model, failure)
        await self._outbox.send(
            [(each.id, failure) for each in waiting], _state(model, ModelState.LOST, reason)
        )

    async def _release_idle(self) -> None:
        if self._leaving:
            busy = self._lanes.runnable(1)
            idle = [model for model in self._leaving if model not in busy and not self._lanes.held(model)]
            for model in idle:
                self._leaving.discard(model)
                await self._release(model, OVER)
        for model in list(self._unloading):
            if self._lanes.drained(model) and not self._lanes.held(model):
                await self._release(model, UNLOADED)

    async def _release(self, model: ModelKey, failure: Failure) -> None:
        if model in self._on_workers:
            self._on_workers.discard(model)
            await self._gaps.forget(model)
            await self._trainer.release(model)
        answers: list[tuple[int, Outcome]] = [(row.id, failure) for row in self._lanes.close(model, failure)]
        if asked := self._unloading.pop(model, None):
            answers.append((asked.id, json_answer({"model_id": (await self._row(model)).model_id})))
        await self._outbox.send(answers, _state(model, ModelState.RELEASED, failure.message))

    # Running

    async def _carry_out(self, unit: Unit | ReadyPass) -> None:
        try:
            async with self._placement.training():
                worked = self._trainer.busy_s
                await self._execute(unit)
                self._metrics.trainer.unit_done(self._trainer.busy_s - worked)
        except TrainerError as error:  # fatal, but these clients shall know what their requests died of
            await self._outbox.send([(row.id, failure_of(error)) for row in unit.rows])
            raise

    async def _execute(self, unit: Unit | ReadyPass) -> None:
        match unit:
            case ReadyPass():
                await self._run_pass(unit)
            case Pass():
                await self._run_pass(await self._passes.prepare(unit))
            case Barriers(rows):
                await self._pass_barriers(unit.kind, rows)

    async def _pass_barriers(self, kind: RequestKind, rows: Sequence[QueuedRow]) -> None:
        if kind is RequestKind.OPTIM_STEP:
            await self._steps.run(rows, self._background)
        elif kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
            await self._syncs.run(rows, self._background)
        else:
            (row,) = rows
            await self._run_single(row)

    async def _run_pass(self, ready: ReadyPass) -> None:
        outputs, _ = await asyncio.gather(self._passes.run(ready), self._look_ahead())
        self._metrics.passed(ready.rows, outputs)
        for row, output in zip(ready.rows, outputs, strict=True):
            if isinstance(output, Failure) and row.kind is RequestKind.FORWARD_BACKWARD:
                why = f"forward_backward with seq_id {row.seq_id} failed: {output.message}"
                self._lanes.poison(model_of(row), why)
        self._background.create_task(self._answer_pass(ready, outputs))

    async def _answer_pass(self, ready: ReadyPass, outputs: Sequence[PassOutput | Failure]) -> None:
        encoded = await encode(outputs)
        await self._outbox.send((row.id, outcome) for row, outcome in zip(ready.rows, encoded, strict=True))
        await self._passes.renew(ready)

    async def _run_single(self, row: QueuedRow) -> None:
        model = await self._row(model_of(row))
        with self._store.read() as conn:
            body = queue.read_bodies(conn, [row.id]).get(row.id)
        if body is None:  # its time was over before its turn
            return
        try:
            await self._single(row, model, body)
        except TrainerError:
            raise
        except Exception as error:  # becomes the result of this request
            await self._single_failed(row, model, failure_of(error))

    async def _single(self, row: QueuedRow, model: ModelRow, body: bytes) -> None:
        match row.kind, row.seq_id:
            case RequestKind.CREATE_MODEL, _:
                await self._created(row, model, await self._models.create(model))
            case RequestKind.LOAD_WEIGHTS, 0:
                finished = await self._models.create_from(model, CreateViaLoadBody.from_bytes(body))
                await self._created(row, model, finished)
            case RequestKind.LOAD_WEIGHTS, _:
                finished = await self._models.load(model, LoadWeightsBody.from_bytes(body))
                self._lanes.cleanse(model.key)
                await self._finish(row, finished)
            case RequestKind.SAVE_WEIGHTS, _:
                saving = await self._saver.capture(row, model, SaveWeightsBody.from_bytes(body))
                self._persist(model.key, self._saver.persist(saving))
            case RequestKind.SAVE_WEIGHTS_EXTERNAL, _:
                exporting = await self._exporter.capture(row, model, SaveExternalBody.from_bytes(body))
                self._persist(model.key, self._exporter.persist(exporting))
            case kind, _:
                raise AssertionError(f"{kind} is no barrier of one model")

    def _persist(self, model: ModelKey, writing: Coroutine[Any, Any, None]) -> None:
        """In the background: the model trains on, but for saves and loads."""
        self._lanes.hold(model)
        self._background.create_task(self._resumed(model, writing))

    async def _resumed(self, model: ModelKey, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await writing
        finally:
            self._lanes.resume(model)
            self._woken.set()

    async def _created(self, row: QueuedRow, model: ModelRow, finished: Finished) -> None:
        self._on_workers.add(model.key)
        await self._finish(row, finished)

    async def _finish(self, row: QueuedRow, finished: Finished) -> None:
        await self._outbox.send([(row.id, finished.outcome)], *finished.also)

    async def _single_failed(self, row: QueuedRow, model: ModelRow, failure: Failure) -> None:
        """A failed creation fails everything that waits behind it."""
        if row.seq_id != 0:
            await self._outbox.send([(row.id, failure)])
            return
        behind = Failure(f"model {model.model_id} was not created: {failure.message}", failure.category)
        waiting = self._lanes.close(model.key, behind)
        await self._outbox.send(
            [(row.id, failure), *((each.id, behind) for each in waiting)],
            _state(model.key, ModelState.FAILED, failure.message),
        )


def _state(model: ModelKey, state: ModelState, reason: str) -> Any:
    def op(conn: Connection) -> None:
        model_records.set_state(conn, model, state, reason)

    return op


def _closed(model: ModelRow) -> Failure:
    """What a model that is not to be trained any more answers."""
    reason = model.state_reason or f"model {model.model_id} is {model.state}"
    return Failure(reason, "server" if model.state is ModelState.LOST else "user")
