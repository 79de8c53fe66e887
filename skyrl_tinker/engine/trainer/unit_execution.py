"""Execution of units of work on the ranks, with their effects, commits and writes to disk."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skyrl_tinker.domain.ids import SAVES, Effect, FutureStatus, ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure, PassOutput
from skyrl_tinker.engine.outbox import AWAY_S, persistently
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.saves.sampler_saves import Publisher, SamplerSave
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import Barriers, Pass, Unit
from skyrl_tinker.engine.scheduling.row_work import PASSES, model_of
from skyrl_tinker.engine.trainer.model_barriers import ModelBarriers, Work
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.engine.trainer.optim_steps import OptimSteps
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator, ReadyPass, encode
from skyrl_tinker.engine.trainer.step_curves import EndedWindows, StepCurves
from skyrl_tinker.engine.unit_commits import PendingWrites, UnitCommits, UnitEnd
from skyrl_tinker.errors import StorageAwayError, TrainerError
from skyrl_tinker.redaction import without_paths
from skyrl_tinker.store.futures.finish import FutureOutcome
from skyrl_tinker.store.futures.queue import QueuedRow, window_failure
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult, TrainerGroup
from skyrl_tinker.training.trainer_spec import retry_budget

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class UnitExecution:
    """Runs units one after another. Use it as a context, within which its background work runs.

    `count_pass`: for metrics. `woken`: set when a model may save and load again.
    """

    _store: Store
    _trainer: TrainerGroup
    _lanes: Lanes
    _models: ModelLifecycle
    _passes: PassCoordinator
    _optim_steps: OptimSteps
    _sampler_saves: Publisher
    _model_barriers: ModelBarriers
    _commits: UnitCommits
    _pending: PendingWrites
    _snapshots: SnapshotKeeper
    _count_pass: Callable[[Sequence[QueuedRow], Sequence[PassOutput | Failure]], None]
    _woken: asyncio.Event

    def __post_init__(self) -> None:
        self._background = asyncio.TaskGroup()
        self._units = itertools.count()
        self._curves = StepCurves(self._lanes.is_open, self._store.now)
        self._own_s: Counter[int] = Counter()
        self._for_room: list[QueuedRow] = []  # saves that wait for host memory, oldest first

    def take_own_seconds(self) -> Mapping[int, float]:
        """Return the seconds of custom losses since the last call, by row id."""
        own_s, self._own_s = self._own_s, Counter()
        return own_s

    async def __aenter__(self) -> None:
        self._units = itertools.count(await persistently(self._store.read, unit_records.next_unit))
        await self._background.__aenter__()
        self._background.create_task(self._commits.run())

    async def __aexit__(self, *error: Any) -> None:
        await self._background.__aexit__(*error)

    async def settle(self) -> None:
        """Wait until all units so far are committed, and no save needs the ranks.

        Does not wait for uploads to storage or loads on samplers, which may be away for long.
        """
        await self._pending.settle()
        await self._snapshots.settle()
        await self._commits.drain()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start work for which neither a unit nor a recovery waits."""
        self._background.create_task(work)

    async def fetch_loads(self) -> None:
        """Begin to fetch the files of the next loads, during units of work. Call it between units."""
        await self._model_barriers.drop_expired()
        for row in self._lanes.start_fetches():
            self._background.create_task(self._fetch(row))

    async def _fetch(self, row: QueuedRow) -> None:
        await self._model_barriers.fetch(row)
        self._lanes.fetch_ended(row)
        self._woken.set()

    async def prepare(self, unit: Pass) -> ReadyPass:
        """Make the batch of a pass; needs no rank."""
        return await self._passes.prepare(unit)

    async def run(self, unit: Barriers | ReadyPass) -> None:
        """Run a unit. If it raises TrainerError, the ranks are broken and nothing of it is recorded.

        Requests for which there is no memory, or no room on another host, wait in their lanes again.
        """
        match unit:
            case ReadyPass():
                await self._run_pass(unit)
            case Barriers(rows) if unit.kind is RequestKind.OPTIM_STEP:
                busy_s = self._trainer.busy_s
                result = await self._optim_steps.apply(rows)
                seconds = self._trainer.busy_s - busy_s
                ended = [row for row in rows if row.id in result.effects]
                windows = self._curves.stepped(ended, result.taken, seconds)
                self._end(rows, result.effects, result.outcomes, seconds=seconds, windows=windows)
            case Barriers(rows) if unit.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
                await self._save_for_samplers(rows)
            case Barriers(rows):
                (row,) = rows
                await self._run_barrier(row)

    async def run_alone(self, row: QueuedRow) -> None:
        """Run one request in small rows. Raises TrainerError."""
        if row.kind in PASSES:
            await self._run_pass(await self.prepare(Pass((row,), full=False, again=True)))
        else:
            await self.run(Barriers((row,)))

    async def fail(self, row: QueuedRow, error: TrainerError) -> None:
        """Fail a request that kills the ranks even when it runs alone."""
        why = _why_deadly(row, error, self._trainer.spec.token_budget)
        _log.error("request %s: %s", row.request_id, why)
        failure = Failure(without_paths(why), "server")
        if row.kind is RequestKind.OPTIM_STEP:
            result = await self._optim_steps.fail(row, failure)
            self._curves.drop(model_of(row))
            self._end([row], result.effects, result.outcomes)
        elif row.seq_id == 0:
            await self._models.fail_creation(row, await self._models.row(model_of(row)), failure)
        else:
            if row.kind is RequestKind.FORWARD_BACKWARD:
                self._invalidate(row, failure)
            self._end([row], {}, {row.id: failure})

    async def repeat_saves(self, rows: Sequence[QueuedRow]) -> None:
        """Repeat saves that were captured but not answered, and restore lost files of published weights."""
        for row in rows:
            if self._pending.is_here(row.id):
                continue
            if not self._trainer.captured.fitting([self._captured_size(row)]):
                await self._pending.settle()
                await self._sampler_saves.end_loans()
            if row.status is not FutureStatus.PENDING:
                if row.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER and row.status is FutureStatus.DONE:
                    model = await self._models.row(model_of(row))
                    await self._sampler_saves.restore(row, model)
                continue
            if row.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
                await self._save_for_samplers([row], recorded=True)
            else:
                await self._run_barrier(row, recorded=True)

    async def _run_pass(self, ready: ReadyPass) -> None:
        """Run a pass; if memory runs out, its rows wait to run again in smaller rows, then each alone.

        Other units may run in between, and only requests that are too large alone fail.
        """
        busy_s = self._trainer.busy_s
        budget = self._trainer.spec.token_budget
        again = ready.again
        result = await self._passes.execute(ready, retry_budget(budget) if again else budget)
        self._own_s.update({row.id: result.own_s.get(row.request_id, 0.0) for row in ready.rows})
        if result.exhausted and not (again and len(ready.rows) == 1):
            _log.warning("%d requests do not fit into memory: they run again", len(ready.rows))
            rows = self._still_open(ready.rows)
            for part in [[row] for row in rows] if again else [rows]:
                self._lanes.put_back_apart(part)
            return
        self._count_pass(ready.rows, result.outputs)
        effects: dict[int, Effect | None] = {}
        for row, output in zip(ready.rows, result.outputs, strict=True):
            backward = row.kind is RequestKind.FORWARD_BACKWARD
            effects[row.id] = Effect.GRADIENTS if backward and isinstance(output, PassOutput) else None
            if backward and isinstance(output, Failure):
                self._invalidate(row, output)
        seconds = self._trainer.busy_s - busy_s
        self._snapshots.work.note(ready.rows, effects, seconds)
        self._curves.passed(ready.rows, ready.requests, result.outputs, seconds)
        end = UnitEnd({}, (), next(self._units), effects, result.row_budget)
        self._commits.add(_with_answers(end, ready, result))
        for model in self._snapshots.work.crowded(ready.rows):
            self._background.create_task(self._remove_replaced(model))
        if ready.sequences:
            self._background.create_task(self._passes.renew_records(ready))

    async def _save_for_samplers(self, rows: Sequence[QueuedRow], *, recorded: bool = False) -> None:
        """Capture, then publish in the background. `recorded`: a replay, whose unit is in the journal."""
        captured = await self._sampler_saves.capture_rows(rows)
        failures = {row_id: save for row_id, save in captured.items() if isinstance(save, Failure)}
        self._end([] if recorded else rows, {}, failures)
        saves = [save for save in captured.values() if isinstance(save, SamplerSave)]
        for save in saves:
            self._lanes.write_began(save.row)
        publishing = await self._sampler_saves.publish(saves, self._start_write, self._background.create_task)
        for save in saves:
            self._lanes.save_began(save.row)
            publishing[save.model.key].add_done_callback(partial(self._save_ended, save.row))

    def _save_ended(self, row: QueuedRow, _: "asyncio.Task[Any]") -> None:
        self._lanes.save_ended(row)
        self._woken.set()

    async def _run_barrier(self, row: QueuedRow, *, recorded: bool = False) -> None:
        try:
            result = await self._model_barriers.execute(row)
        except StorageAwayError as error:
            self._postpone(row, error)
            return
        finished, rows = result.finished, [] if recorded else [row]
        if finished is None:
            self._end(rows, {}, {})
        else:
            effects = {row.id: finished.effect}
            self._end(rows, effects, {row.id: finished.outcome}, finished.also)
            if finished.effect is Effect.LOADED:
                self._curves.drop(model_of(row))
                self._background.create_task(self._remove_replaced(model_of(row)))
        if result.write is not None:
            self._lanes.save_began(row)
            self._start_write(row, result.write()).add_done_callback(partial(self._save_ended, row))

    def _end(
        self,
        rows: Sequence[QueuedRow],
        effects: Mapping[int, Effect | None],
        answers: Mapping[int, FutureOutcome],
        ops: tuple[Any, ...] = (),
        seconds: float = 0.0,
        windows: EndedWindows | None = None,
    ) -> None:
        """Queue the end of a unit for its commit. `rows`: those that have run now."""
        self._snapshots.work.note(rows, effects, seconds)
        all_effects = {row.id: effects.get(row.id) for row in rows}
        end = UnitEnd(answers, ops, next(self._units), all_effects)
        self._commits.add(end if windows is None else _with_points(end, windows))

    def hold(self, model: ModelKey, until: Work | None = None) -> None:
        """Make all requests of a model wait until `until` has ended, by default for AWAY_S."""
        self._lanes.hold(model)
        self._background.create_task(self._resume(model, until or partial(asyncio.sleep, AWAY_S)))

    def put_back(self, rows: Sequence[QueuedRow]) -> None:
        """Make the rows of a unit that did not begin wait again."""
        for row in self._still_open(rows):
            self._lanes.put_back(row)

    def with_room(self, unit: Unit | ReadyPass) -> Unit | ReadyPass | None:
        """Return the part of a unit that may run now: of saves, those that fit into free host memory.

        The others are put back, and their lanes wait until a capture is freed. No save overtakes one that was
        put back before it, unless there is room for both, or nothing is captured.
        """
        if not isinstance(unit, Barriers) or unit.kind not in SAVES:
            return unit
        captured = self._trainer.captured
        line = [row for row in self._for_room if row in unit.rows or self._lanes.waits(row)]
        line += [row for row in unit.rows if row not in line]
        first = line[: captured.fitting(list(map(self._captured_size, line)))]
        run = tuple(row for row in unit.rows if row in first) or (() if captured.held else unit.rows[:1])
        self._for_room = [row for row in line if row not in run]
        later = [row for row in unit.rows if row not in run]
        self.put_back(later)
        for row in later:
            self.hold(model_of(row), captured.next_free().wait)
        return Barriers(run) if run else None

    def _captured_size(self, row: QueuedRow) -> int:
        """Return the bytes of host memory that a save takes."""
        return self._trainer.captured.size(model_of(row), optimizer=row.kind is RequestKind.SAVE_WEIGHTS)

    def _postpone(self, row: QueuedRow, error: StorageAwayError) -> None:
        """Retry a request after AWAY_S, before all others of its model."""
        for open_row in self._still_open([row]):
            _log.warning("request %s waits: %s", row.request_id, error)
            self._lanes.put_back(open_row)
            self.hold(model_of(row))

    def _still_open(self, rows: Sequence[QueuedRow]) -> list[QueuedRow]:
        """Fail the rows whose models were given up while they ran; returns the others."""
        closed = {row.id: failure for row in rows if (failure := self._lanes.closed_by(model_of(row)))}
        if closed:
            self._end([row for row in rows if row.id in closed], {}, closed)
        return [row for row in rows if row.id not in closed]

    async def _resume(self, model: ModelKey, until: Work) -> None:
        await until()
        self._lanes.resume(model)
        self._woken.set()

    def _invalidate(self, row: QueuedRow, failure: Failure) -> None:
        why = window_failure(row.kind, row.seq_id, "failed", failure.message)
        self._lanes.invalidate_window(model_of(row), why)

    def _start_write(self, row: QueuedRow, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._background.create_task(work)
        self._pending.follow(row.id, task)
        return task

    async def _remove_replaced(self, model: ModelKey) -> None:
        await self._commits.drain()
        await self._snapshots.remove_replaced(model)


async def _with_answers(end: UnitEnd, ready: ReadyPass, result: PassResult) -> UnitEnd:
    encoded = await encode(result.outputs)
    answers = {row.id: outcome for row, outcome in zip(ready.rows, encoded, strict=True)}
    return replace(end, outcomes=answers)


async def _with_points(end: UnitEnd, windows: EndedWindows) -> UnitEnd:
    return replace(end, ops=(*end.ops, *await windows.ops()))


def _why_deadly(row: QueuedRow, error: TrainerError, budget: int) -> str:
    why = f"{error}, also when it was run alone; it changed nothing, and other work goes on"
    if row.kind not in PASSES:
        return why
    return (
        f"{why}. It was tried in rows of {budget} tokens (token_budget) and of {retry_budget(budget)}: most "
        "likely there is too little memory. Send shorter sequences, or fewer at once"
    )
