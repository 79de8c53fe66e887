"""Training: plans units of work, has the ranks run them one after another, and brings models back."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from skyrl_tinker.domain.ids import Effect, FutureStatus, ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure, PassOutput
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.outbox import FutureOutcome, Outbox, read_persistently
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.saves.sampler_saves import Publisher, SamplerSave
from skyrl_tinker.engine.scheduling.lanes import PASSES, Lanes, LaneStatus, model_of
from skyrl_tinker.engine.scheduling.planner import Barriers, Pass, Planner, Unit
from skyrl_tinker.engine.scheduling.throughput import UnitTimes
from skyrl_tinker.engine.trainer.model_barriers import ModelBarriers, Write
from skyrl_tinker.engine.trainer.model_lifecycle import UNLOADED, ModelLifecycle
from skyrl_tinker.engine.trainer.optim_steps import OptimSteps
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator, ReadyPass, encode
from skyrl_tinker.engine.trainer.replay import Replay
from skyrl_tinker.engine.unit_commits import UnitCommits, UnitEnd
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.protocol.queue_views import LaneView, TrainingView
from skyrl_tinker.store.futures import outcomes
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult, TrainerGroup
from skyrl_tinker.training.trainer_spec import retry_budget

IDLE_S = 3.0
"""Time without work after which what models ran is kept in snapshots."""
TOGETHER, ALONE = 2, 2
"""Times that a unit is tried as it is; if it kills the ranks each time, that its requests are tried alone."""
_log = logging.getLogger(__name__)

Report = Callable[[str], Awaitable[None]]
"""Called with what a rebuild of the models does; empty: it is done."""


@dataclass(frozen=True, slots=True)
class Executors:
    """Executors of the units of work, by kind."""

    passes: PassCoordinator
    optim_steps: OptimSteps
    sampler_saves: Publisher
    model_barriers: ModelBarriers


class TrainerDriver:
    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        lanes: Lanes,
        planner: Planner,
        models: ModelLifecycle,
        executors: Executors,
        outbox: Outbox,
        commits: UnitCommits,
        snapshots: SnapshotKeeper,
        replay: Replay,
        metrics: Metrics,
        placement: Placement,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._lanes = lanes
        self._planner = planner
        self._models = models
        self._executors = executors
        self._outbox = outbox
        self._commits = commits
        self._snapshots = snapshots
        self._replay = replay
        self._metrics = metrics
        self._placement = placement
        self._prefetched: ReadyPass | None = None
        self._unit_times = UnitTimes()
        self._woken = asyncio.Event()
        self._background = asyncio.TaskGroup()
        self._writes: set[asyncio.Task[Any]] = set()  # saves on their way to the disk and the samplers
        self._units = itertools.count()

    async def submit(self, rows: Sequence[QueuedRow]) -> None:
        """Accept training requests in the order of their arrival."""
        refused: list[tuple[int, FutureOutcome]] = []
        for row in rows:
            refusal = self._refusal(row)
            closed = self._models.closed_by(model_of(row))
            if row.kind is RequestKind.UNLOAD_MODEL:
                self._models.unload(row)
            elif closed is None and self._lanes.ended(row):
                refused.append((row.id, UNLOADED))
            elif closed is None:
                self._lanes.add(row, refusal)
            elif row.status is FutureStatus.PENDING:
                refused.append((row.id, closed))
        await self._outbox.send(refused)
        self._metrics.trainer.work_came()
        self._woken.set()

    def _refusal(self, row: QueuedRow) -> str | None:
        """Return what the API found wrong with a row that arrives as failed."""
        if row.status is not FutureStatus.FAILED:
            return None
        with self._store.read() as conn:
            outcome = outcomes.find(conn, row.request_id)
        return str(orjson.loads(outcome.body)["error"]) if outcome and outcome.body else None

    def backlog(self) -> int:
        """Estimate the tokens of waiting passes."""
        return self._lanes.backlog()

    def view(self) -> TrainingView:
        """Return what waits and how fast it goes."""
        lanes = {
            int(model): LaneView(lane.next_seq, lane.lowest, lane.storage_blocked, lane.session_id)
            for model, lane in self._lanes.statuses().items()
        }
        running = self._unit_times.running
        models = tuple({model_of(row) for row in running})
        kind = running[0].kind if running else None
        return TrainingView(lanes, self._planner.tenants(), models, kind, self._unit_times.seconds())

    def lane_statuses(self) -> dict[ModelKey, LaneStatus]:
        """Return the lanes in which something waits."""
        return self._lanes.statuses()

    async def expire(self, late: Sequence[tuple[QueuedRow, Failure]]) -> None:
        """Fail requests that waited too long; those behind them go on, as behind any failed request."""
        for row, failure in late:
            if row.seq_id:
                self._lanes.expire(row, failure.message)
        begun = {row.id for row, _ in late if not self._lanes.waits(row)}  # and may have taken effect
        await self._outbox.send(
            ((row.id, failure) for row, failure in late if row.seq_id != 0), replayed=begun
        )
        for row, failure in late:
            if row.seq_id == 0:
                await self._models.fail_creation(row, await self._models.row(model_of(row)), failure)
        self._woken.set()

    async def give_up(self, failures: Mapping[ModelKey, Failure]) -> None:
        """Fail all requests of these models, those that wait and those to come."""
        await self._models.give_up(failures)
        self._woken.set()

    def release(self, model: ModelKey) -> None:
        """Release a model whose session is over, once it has nothing left that can run."""
        self._models.release(model)
        self._woken.set()

    def wake(self) -> None:
        """Have the driver look at the ranks: they may be broken."""
        self._woken.set()

    async def resume(self) -> int:
        """Take up where an earlier engine stopped, before `run`.

        Returns the id after which the journal has all requests that must run.
        """
        await self._snapshots.sweep()
        self._units = itertools.count(await read_persistently(self._store, unit_records.next_unit))
        return await self._models.open_ready()

    async def run(self, report: Report) -> None:
        """Bring back the models of an earlier engine, then run units of work.

        Raises TrainerLostError: the ranks die again and again, and only a new engine helps.
        """
        async with self._background:
            self._background.create_task(self._commits.run())
            await self._rebuild(report)
            while True:
                unit = await self._next_unit(report)
                with self._unit_times.unit(unit.rows):
                    await self._run_unit(unit, report)
                self._trainer.note_work()

    async def _next_unit(self, report: Report) -> Unit | ReadyPass:
        if self._trainer.broken is not None:  # before anything that relies on what is repeated then
            await self._rebuild(report)
        if self._prefetched is not None:
            ready, self._prefetched = self._prefetched, None
            return ready
        await self._models.retire()
        while (unit := self._planner.pop()) is None:
            self._metrics.trainer.no_work()
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._woken.wait()
            if not self._woken.is_set() and self._placement.trains and self._snapshots.would_help:
                async with self._placement.training():
                    await self._keep(self._snapshots.take_idle)
            if self._trainer.broken is not None:
                await self._rebuild(report)
            await self._models.retire()
        return unit

    async def _run_unit(self, unit: Unit | ReadyPass, report: Report) -> None:
        """Run a unit; if the ranks die of it, again on fresh ones, then each of its requests alone."""
        for _ in range(TOGETHER):
            if await self._try(self._execute(unit), report) is None:
                return
        for row in unit.rows:
            await self._run_alone(row, report)

    async def _run_alone(self, row: QueuedRow, report: Report) -> None:
        """Run one request of a unit that killed the ranks, in small rows; if it kills them too, fail it."""
        error: TrainerError | None = None
        for _ in range(ALONE):
            if row.kind in PASSES:
                ready = await self._executors.passes.prepare(Pass((row,), full=False))
                work = self._execute_pass(ready, retry_budget(self._trainer.spec.token_budget))
            else:
                work = self._execute(Barriers((row,)))
            if (error := await self._try(work, report)) is None:
                return
        assert error is not None
        while await self._try(self._fail(row, error), report) is not None:
            pass  # the ranks died again, of something else

    async def _try(self, work: Coroutine[Any, Any, None], report: Report) -> TrainerError | None:
        """Run a unit's work; if the ranks break, bring everything else back, and return the cause."""
        try:
            async with self._placement.training():
                busy_s = self._trainer.busy_s
                await work
                self._metrics.trainer.unit_done(self._trainer.busy_s - busy_s)
                await self._keep(self._snapshots.take_due)
        except TrainerError as error:
            await self._rebuild(report)
            return error
        finally:
            work.close()
        return None

    async def _keep(self, take: Callable[[], Awaitable[None]]) -> None:
        """Take a snapshot, perhaps. Broken ranks show in the next unit."""
        with suppress(TrainerError):
            await take()

    async def _execute(self, unit: Unit | ReadyPass) -> None:
        match unit:
            case ReadyPass():
                await self._execute_pass(unit)
            case Pass():
                await self._execute_pass(await self._executors.passes.prepare(unit))
            case Barriers(rows) if unit.kind is RequestKind.OPTIM_STEP:
                busy_s = self._trainer.busy_s
                result = await self._executors.optim_steps.apply(rows)
                self._end(rows, result.effects, result.outcomes, seconds=self._trainer.busy_s - busy_s)
            case Barriers(rows) if unit.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
                await self._save_for_samplers(rows)
            case Barriers(rows):
                (row,) = rows
                await self._execute_barrier(row)

    async def _execute_pass(self, ready: ReadyPass, row_budget: int | None = None) -> None:
        prefetch = asyncio.create_task(self._prefetch())
        busy_s = self._trainer.busy_s
        try:
            result = await self._executors.passes.execute(ready, row_budget)
        finally:
            await prefetch  # rows that it has taken must come next
        self._metrics.passed(ready.rows, result.outputs)
        effects: dict[int, Effect | None] = {}
        for row, output in zip(ready.rows, result.outputs, strict=True):
            backward = row.kind is RequestKind.FORWARD_BACKWARD
            effects[row.id] = Effect.GRADIENTS if backward and isinstance(output, PassOutput) else None
            if backward and isinstance(output, Failure):
                self._invalidate(row, output)
        self._snapshots.note(ready.rows, effects, self._trainer.busy_s - busy_s)
        end = UnitEnd({}, (), next(self._units), effects, result.row_budget)
        self._commits.add(_with_answers(end, ready, result))
        if ready.sequences:
            self._background.create_task(self._executors.passes.renew_records(ready))

    async def _prefetch(self) -> None:
        """Prepare the next pass while one runs."""
        unit = self._planner.pop_full_pass()
        if unit is not None:
            self._prefetched = await self._executors.passes.prepare(unit)

    async def _save_for_samplers(self, rows: Sequence[QueuedRow], *, recorded: bool = False) -> None:
        """Capture, then publish in the background. `recorded`: a replay, whose unit is in the journal."""
        captured = await self._executors.sampler_saves.capture_rows(rows)
        failures = {row_id: save for row_id, save in captured.items() if isinstance(save, Failure)}
        self._end([] if recorded else rows, {}, failures)
        saves = [save for save in captured.values() if isinstance(save, SamplerSave)]
        await self._executors.sampler_saves.publish(saves, self._start_write)

    async def _execute_barrier(self, row: QueuedRow, *, recorded: bool = False) -> None:
        result = await self._executors.model_barriers.execute(row)
        finished, rows = result.finished, [] if recorded else [row]
        if finished is None:
            self._end(rows, {}, {})
        else:
            effects = {row.id: finished.effect}
            self._end(rows, effects, {row.id: finished.outcome}, finished.also)
            if finished.effect is Effect.LOADED:
                self._background.create_task(self._remove_replaced(model_of(row)))
        if result.write is not None:
            self._lanes.block_storage(model_of(row))
            self._start_write(self._finish_write(model_of(row), result.write))

    async def _fail(self, row: QueuedRow, error: TrainerError) -> None:
        """Fail a request that kills the ranks, also when it is run alone."""
        failure = Failure(_why_deadly(row, error, self._trainer.spec.token_budget), "server")
        _log.error("request %s: %s", row.request_id, failure.message)
        if row.kind is RequestKind.OPTIM_STEP:
            result = await self._executors.optim_steps.fail(row, failure)
            self._end([row], result.effects, result.outcomes)
        elif row.seq_id == 0:
            await self._models.fail_creation(row, await self._models.row(model_of(row)), failure)
        else:
            if row.kind is RequestKind.FORWARD_BACKWARD:
                self._invalidate(row, failure)
            self._end([row], {}, {row.id: failure})

    def _end(
        self,
        rows: Sequence[QueuedRow],
        effects: Mapping[int, Effect | None],
        answers: Mapping[int, FutureOutcome],
        ops: tuple[Any, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        """Queue the end of a unit for its commit. `rows`: those that have run now."""
        self._snapshots.note(rows, effects, seconds)
        all_effects = {row.id: effects.get(row.id) for row in rows}
        self._commits.add(UnitEnd(answers, ops, next(self._units), all_effects))

    def _invalidate(self, row: QueuedRow, failure: Failure) -> None:
        why = f"forward_backward with seq_id {row.seq_id} failed: {failure.message}"
        self._lanes.invalidate_window(model_of(row), why)

    def _start_write(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._background.create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    async def _finish_write(self, model: ModelKey, write: Write) -> None:
        """Write a save in the background: the model trains on, but neither saves nor loads."""
        try:
            await write
        finally:
            self._lanes.unblock_storage(model)
            self._woken.set()

    async def _remove_replaced(self, model: ModelKey) -> None:
        await self._commits.drain()
        await self._snapshots.remove_replaced(model)

    # Back after a crash

    async def _rebuild(self, report: Report) -> None:
        """Bring back every model that is ready, on fresh ranks, as it was after the last unit committed.

        All that ran before the ranks broke is committed first, so nothing runs twice.
        """
        lost: dict[ModelKey, str] | None = None
        while lost is None:
            if self._writes:
                await asyncio.wait(self._writes)
            await self._snapshots.settle()
            await self._commits.drain()
            with suppress(TrainerError):  # they died again: TrainerLostError if that goes on
                async with self._placement.training():
                    if self._trainer.broken is not None:
                        await report("the trainer was restarted")
                        await self._trainer.restart()
                    lost = await self._replay.run(self._repeat_saves, partial(_progress, report))
        self._trainer.note_work()  # they did: what killed them before is not the ranks
        for model, cause in lost.items():
            _log.error("model %s cannot be brought back: %s", model, cause)
            await self._models.lose(model, cause)
        await report("")

    async def _repeat_saves(self, rows: Sequence[QueuedRow]) -> None:
        """Repeat saves that were captured and not answered, and restore published weights that are gone."""
        for row in rows:
            if row.status is not FutureStatus.PENDING:
                if row.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER and row.status is FutureStatus.DONE:
                    model = await self._models.row(model_of(row))
                    await self._executors.sampler_saves.restore(row, model)
            elif row.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
                await self._save_for_samplers([row], recorded=True)
            else:
                await self._execute_barrier(row, recorded=True)


async def _with_answers(end: UnitEnd, ready: ReadyPass, result: PassResult) -> UnitEnd:
    encoded = await encode(result.outputs)
    answers = {row.id: outcome for row, outcome in zip(ready.rows, encoded, strict=True)}
    return replace(end, outcomes=answers)


async def _progress(report: Report, done: int, units: int) -> None:
    await report(f"replaying {done} of {units} units")


def _why_deadly(row: QueuedRow, error: TrainerError, budget: int) -> str:
    why = f"{error}, also when it was run alone; it changed nothing, and other work goes on"
    if row.kind not in PASSES:
        return why
    return (
        f"{why}. It was tried in rows of {budget} tokens (token_budget) and of {retry_budget(budget)}: most "
        "likely there is too little memory. Send shorter sequences, or fewer at once"
    )
