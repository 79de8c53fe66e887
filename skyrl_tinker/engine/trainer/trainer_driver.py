"""Training: plans units of work, runs them on the ranks one after another, and brings models back."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.listing import Listing
from skyrl_tinker.engine.scheduling.planner import Barriers, Pass, Planner, Unit
from skyrl_tinker.engine.scheduling.row_work import PASSES, cost, model_of
from skyrl_tinker.engine.scheduling.throughput import TrainerPace, UnitTimes
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.engine.trainer.pass_preparation import ReadyPass
from skyrl_tinker.engine.trainer.replay import Replay, ReplayedModels
from skyrl_tinker.engine.trainer.sleeping_models import SleepingModels
from skyrl_tinker.engine.trainer.training_requests import TrainingRequests
from skyrl_tinker.engine.trainer.unit_execution import UnitExecution
from skyrl_tinker.errors import TrainerError, TrainerLostError
from skyrl_tinker.protocol.queue_views import ASLEEP, INCIDENTS, Incident, TrainingView
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup

IDLE_S, IDLE_PACE_S = 3.0, 0.5
"""Seconds without work before an idle snapshot, and between two of them."""
TOGETHER, ALONE = 2, 2
"""Tries of a unit as a whole; then, if it kills the ranks each time, tries of each request alone."""
SHOWN_MODELS = 16
_log = logging.getLogger(__name__)


MayEnd = Callable[[float], bool]
"""Return whether the work may end, from the seconds for which there was none."""


class Report(Protocol):
    async def __call__(self, detail: str, *, done: bool = False) -> None:
        """Report the progress of a rebuild of the models. `done`: all that do not sleep are back."""


@dataclass(eq=False)
class TrainerDriver:
    """Driver of one base model's trainer. `woken`: set when there may be work."""

    _store: Store
    _trainer: TrainerGroup
    _lanes: Lanes
    _planner: Planner
    _pace: TrainerPace
    _models: ModelLifecycle
    _execution: UnitExecution
    requests: TrainingRequests
    _snapshots: SnapshotKeeper
    _replay: Replay
    _sleeping: SleepingModels
    _metrics: Metrics
    _placement: Placement
    woken: asyncio.Event

    def __post_init__(self) -> None:
        self.facts = self.requests.facts
        self._occupancy = self.requests.occupancy
        self._ahead: ReadyPass | None = None  # prepared, but not taken from the lanes
        self._unit_times = UnitTimes()
        self._listing = Listing(self._list_waiting)
        self._worked_s = 0.0  # seconds on the current unit, in the trainer's phases
        self._incidents: deque[Incident] = deque(maxlen=INCIDENTS)
        self._told_asleep = False
        self._wanted: frozenset[ModelKey] = frozenset()  # the models of the unit that runs
        self._taken = 0  # snapshots at the last idle check
        self._idle_since: float | None = None  # None while there is work
        self.background: AbstractAsyncContextManager[None] = self._execution
        """Work that goes on while ranks are lost: call `run` within it."""

    def view(self) -> TrainingView:
        """Return the waiting work, at most LISTED_S old unless it is paused, and its recent speed."""
        running = self._unit_times.running
        return replace(
            self._listing.get() if self.requests.paused is None else self._list_waiting(),
            running=tuple({model_of(row) for row in running}),
            running_kind=running[0].kind if running else None,
            unit_s=self._unit_times.seconds(),
            running_tokens=sum(cost(row) for row in running if row.kind in PASSES),
            running_s=self._unit_times.running_s(),
            incidents=tuple(self._incidents),
            paused=self.requests.paused,
        )

    def _list_waiting(self) -> TrainingView:
        waiting = self._planner.in_turn()
        following = [row for row in waiting if row.kind is waiting[0].kind]
        return TrainingView(
            {int(model): lane for model, lane in self._lanes.statuses().items()},
            tuple(dict.fromkeys(row.session_id for row in waiting)),
            next_kind=waiting[0].kind if waiting else None,
            next_models=tuple(model_of(row) for row in following[:SHOWN_MODELS]),
        )

    @property
    def idle_s(self) -> float:
        """Seconds for which there was no work; 0 while there is, or any request waits for some."""
        since = self._idle_since
        return 0.0 if since is None or self.requests.asked else time.monotonic() - since

    def wake(self) -> None:
        """Make the driver check the ranks: they may be broken."""
        self.woken.set()

    async def sweep(self) -> None:
        """Remove the files that an earlier engine left, of models of any base model, before `resume`."""
        await self._snapshots.sweep()

    async def resume(self) -> dict[ModelKey, int]:
        """Continue where an earlier engine stopped, before `run`. Returns the models' next seq_ids."""
        return await self._models.open_ready()

    async def run(self, report: Report, may_end: MayEnd = lambda _: False) -> None:
        """Bring back the models of earlier ranks, then run units of work until there is none and it may end.

        Raises TrainerLostError if the ranks die again and again; it can run again, on others.
        """
        self._wanted = frozenset()
        await self._rebuild(report)
        while (planned := await self._next_unit(report, may_end)) is not None:
            if not await self._awake(planned.rows, report):
                continue
            if (unit := self._execution.with_room(planned)) is None:
                self._planner.charge(())
                continue
            self._worked_s, began_at = 0.0, self._store.now()
            self._metrics.began(unit.rows, began_at)
            self._wanted = frozenset(map(model_of, unit.rows))
            with self._unit_times.unit(unit.rows):
                await self._run(unit, report)
            self._wanted = frozenset()
            self._metrics.unit(self.facts.name, unit.rows, began_at, self._worked_s)
            own_s = self._execution.take_own_seconds()
            self._planner.charge(self._pace.attribute(unit.rows, self._worked_s, own_s))
            self._trainer.note_work()

    async def settle(self) -> None:
        """Wait until nothing needs the ranks, once `run` has ended."""
        await self._execution.settle()

    async def retire(self) -> None:
        """Release the models that are due, while there are no ranks."""
        await self._models.retire(self._execution.start)

    async def _next_unit(self, report: Report, may_end: MayEnd) -> Unit | ReadyPass | None:
        """Return the next unit; None, in the same step, once there is none and the work may end."""
        if self._trainer.broken is not None:  # first: all later steps rely on its replay
            await self._rebuild(report)
        self.woken.clear()  # before the search for work, so that no later event is lost
        await self._execution.fetch_loads()
        await self._models.retire(self._execution.start)
        ready, self._ahead = self._ahead, None
        since, wait_s = time.monotonic(), IDLE_S
        while (unit := self._planner.pop(ready.rows if ready else ())) is None:
            self._idle_since = since
            ending = may_end(time.monotonic() - since)
            if ending and self._is_over():
                return None
            self._occupancy.no_work()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.woken.wait()
            wait_s = IDLE_S
            free = not self.woken.is_set() and (ending or self._placement.trains)
            if free and await self._use_idle_time(report):
                wait_s = min(IDLE_S, IDLE_PACE_S)
            self.woken.clear()
            if self._trainer.broken is not None:
                await self._rebuild(report)
            await self._execution.fetch_loads()
            await self._models.retire(self._execution.start)
        self._idle_since = None
        return ready if ready is not None and ready.rows == unit.rows else unit

    def _is_over(self) -> bool:
        """Return whether no request needs the ranks, and no snapshot is to be taken first."""
        return not (self.woken.is_set() or self.requests.asked or self._snapshots.owed)

    async def _use_idle_time(self, report: Report) -> bool:
        """Bring a model back, or take a snapshot; return True if more such work may follow soon."""
        woke = True
        with suppress(TrainerError):  # broken ranks show in the next check
            woke = await self._sleeping.wake_idle()
        await self._tell_awake(report)
        if woke or not self._snapshots.would_help:
            return woke
        kept, self._taken = self._snapshots.taken > self._taken, self._snapshots.taken
        async with self._placement.training():
            await self._keep(self._snapshots.take_largest)
        return kept

    async def _tell_awake(self, report: Report) -> None:
        """Report once that no model sleeps any more."""
        if self._told_asleep and not self._sleeping.left():
            self._told_asleep = False
            await report("", done=True)

    async def _awake(self, rows: Sequence[QueuedRow], report: Report) -> bool:
        """Bring the models of a unit onto the ranks; return False if one is not: the rows then wait again."""
        with suppress(TrainerError):  # broken ranks show before the next unit
            if await self._sleeping.wake_for(rows, self._planner.in_turn):
                await self._tell_awake(report)
                return True
        self._execution.put_back(rows)
        self._planner.charge(())
        return False

    async def _run(self, unit: Unit | ReadyPass, report: Report) -> None:
        """Run a unit; during a pass, prepare the next one."""
        if isinstance(unit, Barriers):
            await self._run_unit(unit, report)
            return
        ready = await self._execution.prepare(unit) if isinstance(unit, Pass) else unit
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._prepare_ahead())
            await self._run_unit(ready, report)

    async def _run_unit(self, unit: Barriers | ReadyPass, report: Report) -> None:
        """Run a unit; if it kills the ranks, retry it on fresh ones, then each of its requests alone.

        If no fresh ones live, the requests that have not run wait again.
        """
        left = unit.rows
        try:
            for _ in range(TOGETHER):
                if await self._try(self._execution.run(unit), report) is None:
                    return
                if isinstance(unit, Barriers):
                    left = tuple(filter(self._is_left, unit.rows))
                    if not left:
                        return
                    unit = Barriers(left)
            while left:
                await self._run_alone(left[0], report)
                left = left[1:]
        except TrainerLostError:
            self._execution.put_back(left)
            raise

    async def _run_alone(self, row: QueuedRow, report: Report) -> None:
        """Run one request of a unit that killed the ranks, in small rows; if it kills them too, fail it."""
        error: TrainerError | None = None
        for _ in range(ALONE):
            if not self._is_left(row):
                return
            if (error := await self._try(self._execution.run_alone(row), report)) is None:
                return
        assert error is not None
        while self._is_left(row) and await self._try(self._execution.fail(row, error), report) is not None:
            pass  # the ranks died again, for another reason

    def _is_left(self, row: QueuedRow) -> bool:
        """Return whether a request is still to run: not if its model was parked after a death."""
        return self._lanes.knows(model_of(row))

    async def _prepare_ahead(self) -> None:
        """Prepare the next pass while one runs, if it is full; wasted if other work then goes first."""
        unit = self._planner.full_pass_ahead()
        if unit is not None:
            self._ahead = await self._execution.prepare(unit)

    async def _try(self, work: Coroutine[Any, Any, None], report: Report) -> TrainerError | None:
        """Run a unit's work; if the ranks break, bring all models back, and return the cause."""
        try:
            async with self._placement.training():
                busy_s, began = self._trainer.busy_s, time.monotonic()
                try:
                    await work
                finally:
                    self._worked_s += time.monotonic() - began
                self._occupancy.unit_done(self._trainer.busy_s - busy_s)
                await self._keep(self._snapshots.take_due)
        except TrainerError as error:
            await self._rebuild(report)
            return error
        finally:
            work.close()
        return None

    async def _keep(self, take: Callable[[], Awaitable[None]]) -> None:
        """Take a snapshot if `take` finds it due. Broken ranks show in the next unit."""
        with suppress(TrainerError):
            await take()

    async def _rebuild(self, report: Report) -> None:
        """Bring back every ready model, on fresh ranks, in its state after the last committed unit.

        All units that ran before the ranks broke are committed first, so nothing runs twice. The models of
        the current unit must not sleep: it is tried again, and then each of its requests alone.
        """
        replayed: ReplayedModels | None = None
        while replayed is None:
            await self._execution.settle()
            with suppress(TrainerError):  # they died again: TrainerLostError if this continues
                await self._restart(report)
                async with self._snapshots.replaying:
                    replayed = await self._replay.run(
                        self._execution.repeat_saves, partial(_progress, report), self._wanted
                    )
        if replayed.models > replayed.asleep:
            self._trainer.note_work()  # the replay worked, so the ranks themselves are sound
        await self._models.park(replayed.failed)
        if replayed.models:
            _log.info("%s", replayed)
            self._incidents.append(Incident(self._store.now(), str(replayed), mended=True))
        self._told_asleep = replayed.asleep > 0
        await report(ASLEEP if self._told_asleep else "", done=True)

    async def _restart(self, report: Report) -> None:
        """Have fresh ranks, if they are broken."""
        async with self._placement.training():
            if self._trainer.broken is not None:
                cause = f"the trainer was lost: {self._trainer.broken}"
                if not self._incidents or self._incidents[-1].text != cause:
                    self._incidents.append(Incident(self._store.now(), cause))
                await report(f"the trainer is restarted: {self._trainer.broken}")
                await self._trainer.restart()


async def _progress(report: Report, done: int, units: int) -> None:
    await report(f"replaying {done} of {units} units")
