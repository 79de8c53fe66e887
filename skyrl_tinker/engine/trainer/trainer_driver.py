"""Training: plans units of work, has the workers run them one after another, and sends their results."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure, PassOutput
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.outbox import FutureOutcome, Outbox, failure_of
from skyrl_tinker.engine.saves.sampler_saves import Publisher
from skyrl_tinker.engine.scheduling.lanes import Lanes, LaneStatus, model_of
from skyrl_tinker.engine.scheduling.planner import Barriers, Pass, Planner, Unit
from skyrl_tinker.engine.scheduling.throughput import UnitTimes
from skyrl_tinker.engine.trainer.model_barriers import ModelBarriers, Write
from skyrl_tinker.engine.trainer.model_lifecycle import UNLOADED, ModelLifecycle
from skyrl_tinker.engine.trainer.optim_steps import OptimSteps
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator, ReadyPass, encode
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.protocol.queue_views import LaneView, TrainingView
from skyrl_tinker.store.futures import outcomes
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup


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
        self._metrics = metrics
        self._placement = placement
        self._prefetched: ReadyPass | None = None
        self._unit_times = UnitTimes()
        self._woken = asyncio.Event()
        self._background = asyncio.TaskGroup()

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
        await self._outbox.send((row.id, failure) for row, failure in late if row.seq_id != 0)
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

    async def run(self) -> None:
        """Run units of work. Raises TrainerError when the workers are broken, and every model with them."""
        async with self._background:
            while True:
                unit = await self._next_unit()
                with self._unit_times.unit(unit.rows):
                    await self._run_unit(unit)

    async def _next_unit(self) -> Unit | ReadyPass:
        if self._prefetched is not None:
            ready, self._prefetched = self._prefetched, None
            return ready
        await self._models.retire()
        while (unit := self._planner.pop()) is None:
            self._metrics.trainer.no_work()
            self._woken.clear()
            await self._woken.wait()
            await self._models.retire()
        return unit

    async def _run_unit(self, unit: Unit | ReadyPass) -> None:
        try:
            async with self._placement.training():
                busy_s = self._trainer.busy_s
                await self._execute(unit)
                self._metrics.trainer.unit_done(self._trainer.busy_s - busy_s)
        except TrainerError as error:  # fatal, but its requests must report the cause
            await self._outbox.send([(row.id, failure_of(error)) for row in unit.rows])
            raise

    async def _execute(self, unit: Unit | ReadyPass) -> None:
        match unit:
            case ReadyPass():
                await self._execute_pass(unit)
            case Pass():
                await self._execute_pass(await self._executors.passes.prepare(unit))
            case Barriers(rows) if unit.kind is RequestKind.OPTIM_STEP:
                await self._executors.optim_steps.apply(rows, self._background)
            case Barriers(rows) if unit.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
                await self._executors.sampler_saves.save(rows, self._background)
            case Barriers(rows):
                (row,) = rows
                write = await self._executors.model_barriers.execute(row)
                if write is not None:
                    self._lanes.block_storage(model_of(row))
                    self._background.create_task(self._finish_write(model_of(row), write))

    async def _execute_pass(self, ready: ReadyPass) -> None:
        outputs, _ = await asyncio.gather(self._executors.passes.execute(ready), self._prefetch())
        self._metrics.passed(ready.rows, outputs)
        for row, output in zip(ready.rows, outputs, strict=True):
            if isinstance(output, Failure) and row.kind is RequestKind.FORWARD_BACKWARD:
                why = f"forward_backward with seq_id {row.seq_id} failed: {output.message}"
                self._lanes.invalidate_window(model_of(row), why)
        self._background.create_task(self._send_outputs(ready, outputs))

    async def _prefetch(self) -> None:
        """Prepare the next pass while one runs."""
        unit = self._planner.pop_full_pass()
        if unit is not None:
            self._prefetched = await self._executors.passes.prepare(unit)

    async def _send_outputs(self, ready: ReadyPass, outputs: Sequence[PassOutput | Failure]) -> None:
        encoded = await encode(outputs)
        await self._outbox.send((row.id, outcome) for row, outcome in zip(ready.rows, encoded, strict=True))
        await self._executors.passes.renew_records(ready)

    async def _finish_write(self, model: ModelKey, write: Write) -> None:
        """Write a save in the background: the model trains on, but neither saves nor loads."""
        try:
            await write
        finally:
            self._lanes.unblock_storage(model)
            self._woken.set()
