"""Supervisor of one base model: starts its processes, runs it beside the others, and starts it again."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from enum import Enum, auto
from functools import partial

from skyrl_tinker.engine.bases.base_room import BaseRoom
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime
from skyrl_tinker.engine.bases.base_statuses import ON_DEMAND, BaseStatuses
from skyrl_tinker.engine.sampler.sleep import SleepControl
from skyrl_tinker.engine.scheduling.sample_gate import SampleGate
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.errors import SkyrlTinkerError, TrainerLostError, WeightsAwayError, last_line, root_cause
from skyrl_tinker.protocol.schemas.administration import ChangeBaseRequest
from skyrl_tinker.redaction import without_paths
from skyrl_tinker.training.trainer_group import TrainerGroup

PAUSES_S = (1.0, 5.0, 30.0)
"""Time until the next try after each failure in a row."""
PING_S, PING_TIMEOUT_S = 2.0, 30.0
ROOM_IDLE_S = 60.0
"""Time without requests after which one on demand stops for another that lacks GPUs."""
STOP_CHECK_S = 1.0
"""Time between two checks whether one that is only sampled may stop."""
_log = logging.getLogger(__name__)


class _RunState(Enum):
    """A request, too, takes a base model from STOPPED to STARTING.

    It is STOPPED again, or STARTING where it always runs, once it may stop, is lost, or does not start.
    """

    STOPPED = auto()  # also while its processes end
    STARTING = auto()  # waits for GPUs, its processes, or the next try
    STARTING_TO_STOP = auto()  # an administrator has asked for the stop
    RUNNING = auto()
    RUNNING_TO_STOP = auto()


_IS_UP = {_RunState.STARTING: _RunState.RUNNING, _RunState.STARTING_TO_STOP: _RunState.RUNNING_TO_STOP}
_START_ASKED = {
    _RunState.STOPPED: _RunState.STARTING,
    _RunState.STARTING_TO_STOP: _RunState.STARTING,
    _RunState.RUNNING_TO_STOP: _RunState.RUNNING,
}
_STOP_ASKED = {_RunState.STARTING: _RunState.STARTING_TO_STOP, _RunState.RUNNING: _RunState.RUNNING_TO_STOP}


class BaseSupervisor:
    """Supervisor that tries a base model again which does not start, or whose ranks are lost.

    It does while others serve. Requests wait for the second try, as that may help, then fail until it has
    started. One on demand starts with a request, also after a failure, and stops when it has been idle for
    its `idle_s`: its models come back with the next start, as after a crash.
    """

    def __init__(
        self, runtime: BaseRuntime, driver: TrainerDriver | None, statuses: BaseStatuses, room: BaseRoom
    ) -> None:
        """`driver`: of its trainer, if it has one. `room`: of all on demand."""
        self._runtime = runtime
        self.name = runtime.facts.name
        self._driver = driver
        self._statuses = statuses
        self._room = room
        self._report_parts = partial(statuses.starting, self.name)
        self._gate = SampleGate() if runtime.samplers is None else runtime.samplers.gate
        self._asked = self._gate.asked if driver is None else driver.woken
        self._failures = 0  # in a row
        self._ended = _RunState.STARTING if runtime.idle_s is None else _RunState.STOPPED
        self._state = self._ended
        self._starting = f"base model {self.name} is being started"
        self._stopped = f"base model {self.name} is stopped: {ON_DEMAND}"
        self._pause(self._starting if runtime.idle_s is None else self._stopped)

    async def run(self, resumed: Awaitable[object]) -> None:
        """Start the base model and, once the models are `resumed`, run it.

        Raises SkyrlTinkerError if neither it nor any other base model starts.
        """
        async with nullcontext() if self._driver is None else self._driver.background:
            while True:
                if self._runtime.idle_s is not None:
                    await self._rest()
                end = await self._live(resumed)
                await (self._stop(end) if isinstance(end, str) else self._recover(end))

    @property
    def idle_s(self) -> float | None:
        """Seconds without requests of one on demand; None where it does not run, or always does."""
        if self._state not in _IS_UP.values() or self._runtime.idle_s is None:
            return None
        return min(self._gate.idle_s, math.inf if self._driver is None else self._driver.idle_s)

    def _idle(self) -> float:
        return self.idle_s or 0.0

    def ask_start(self) -> str:
        """Start it without a request, if it is on demand; return what follows."""
        self._state = _START_ASKED.get(self._state, self._state)
        self._asked.set()
        return f"base model {self.name} runs" if self._state is _RunState.RUNNING else self._starting

    def ask_stop(self) -> str:
        """Stop it as soon as nothing needs it, if it is on demand; return what follows."""
        self._state = _STOP_ASKED.get(self._state, self._state)
        if self._state is _RunState.STOPPED:
            return self._stopped
        return f"base model {self.name} stops once no request waits or runs"

    async def _rest(self) -> None:
        """Wait until a request needs the processes, also where those before it have failed, and for room."""
        entered = False
        while not entered:
            while not self._is_wanted():
                self._state = _RunState.STOPPED
                self._asked.clear()
                if self._driver is not None:
                    self._driver.requests.accept()
                await self._await(ON_DEMAND)
                await self._asked.wait()
            entered = await self._room.enter(self.name, self._idle, self._await, self._is_wanted)
        if self._state is _RunState.STOPPED:
            self._state = _RunState.STARTING
        self._pause(self._starting)
        await self._report_parts(self._runtime.processes.parts)

    async def _await(self, why: str) -> None:
        """Tell why it is stopped, and release models that are due."""
        self._pause(f"base model {self.name} is stopped: {why}")
        if self._driver is not None:
            await self._driver.retire()
        await self._statuses.waits(self.name, why)

    def _is_wanted(self) -> bool:
        """Return whether an administrator has asked for the start, or any request needs it."""
        if self._state is _RunState.STARTING:
            return True
        return self._gate.in_use or (self._driver is not None and self._driver.requests.asked)

    async def _live(self, resumed: Awaitable[object]) -> str | SkyrlTinkerError:
        """Start the base model, and run it; return why it stops, or the error that ends it."""
        lost: BaseException | None = None
        try:
            await self._runtime.processes.start(self._report_parts)
            await resumed  # the check has files where those of an earlier engine are removed
            await self._runtime.processes.check()
        except* SkyrlTinkerError as group:
            lost = root_cause(group)
        if lost is None:
            await self._accept()
            try:
                return await self._serve()
            except* TrainerLostError as group:
                lost = root_cause(group)
        assert isinstance(lost, SkyrlTinkerError)
        return lost

    async def _serve(self) -> str:
        """Run the base model until it may stop; then its requests wait. Return why."""
        runtime, driver = self._runtime, self._driver
        async with asyncio.TaskGroup() as tasks:
            watches: list[asyncio.Task[None]] = []
            if (samplers := runtime.samplers) is not None:
                supervised = samplers.fleet.supervise(self._statuses.report, samplers.equip)
                sleep_control = SleepControl(samplers.fleet, samplers.drop_weights)
                watches += map(tasks.create_task, (supervised, runtime.placement.run(sleep_control)))
            if runtime.trainer is not None and driver is not None:
                watches.append(tasks.create_task(_watch_trainer(runtime.trainer, driver)))
                await driver.run(self._report_rebuild, self._may_stop)
            else:
                await self._until_idle()
            why = "as was asked" if self._state is _RunState.RUNNING_TO_STOP else "as it was idle"
            self._state = self._ended  # in the same step: no request comes in between
            self._pause(self._stopped)
            for watch in watches:
                watch.cancel()
        return why

    def _may_stop(self, untrained_s: float) -> bool:
        """Return whether no request has come for long, of training not for `untrained_s`.

        Once it has been asked to stop: whether samplers serve none. While another waits for its GPUs a
        shorter time counts, which a script's own work between two requests seldom takes.
        """
        most_s = self._runtime.idle_s
        if most_s is None or self._gate.in_use:
            return False
        if self._room.wants(self.name):
            most_s = min(most_s, ROOM_IDLE_S)
        return self._state is _RunState.RUNNING_TO_STOP or min(untrained_s, self._gate.idle_s) >= most_s

    async def _until_idle(self) -> None:
        """Return, in the same step, once one without a trainer may stop."""
        while True:
            if self._may_stop(math.inf):
                return
            await asyncio.sleep(min(STOP_CHECK_S, self._runtime.idle_s or STOP_CHECK_S))

    async def _stop(self, why: str) -> None:
        """End all of it, with nothing under way. Raises TrainerLostError when Ray is gone."""
        if self._driver is not None:
            await self._driver.settle()
        await self._runtime.processes.end()
        self._room.leave(self.name)
        self._failures = 0
        _log.info("%s: stopped, %s; %s", self.name, why, ON_DEMAND)
        await self._statuses.stopped(self.name)

    async def _recover(self, lost: SkyrlTinkerError) -> None:
        """End all of it, and wait for the next try."""
        if not self._statuses.others_may_serve(self.name):
            raise lost
        self._state = self._ended
        self._pause(self._starting)
        await self._runtime.processes.end()
        self._room.leave(self.name)
        pause_s = PAUSES_S[min(self._failures, len(PAUSES_S) - 1)]
        self._failures += 1
        _log.error("%s: the next try is in %.0f s: %s", self.name, pause_s, lost)
        fails, why = f"base model {self.name} does not start:", last_line(str(lost))
        await self._statuses.failed(self.name, f"{fails} {why}")
        told = f"{fails} {without_paths(why)}"
        if isinstance(lost, WeightsAwayError):
            self._pause(told)
        elif self._failures > 1:
            self._gate.close(f"{told}; other base models are unaffected", refuses=True)
            if self._driver is not None:
                await self._driver.requests.refuse(told)
        if self._driver is not None:
            await self._driver.retire()
        await asyncio.sleep(pause_s)

    def _pause(self, why: str) -> None:
        """Have requests wait, with the reason."""
        self._gate.close(why)
        if self._driver is not None:
            self._driver.requests.paused = why
            if self._runtime.samplers is not None:
                self._runtime.samplers.await_replay()

    async def _accept(self) -> None:
        await self._statuses.started(self.name)
        self._state = _IS_UP[self._state]
        self._gate.open()
        if self._driver is not None:
            self._driver.requests.accept()

    async def _report_rebuild(self, detail: str, *, done: bool = False) -> None:
        """Report the progress of bringing models back, as a driver's Report, also to requests that wait."""
        if self._driver is not None:
            told = f"base model {self.name}: {without_paths(detail)}"
            self._driver.requests.paused = None if done else told
        if done:
            self._failures = 0
            if self._runtime.samplers is not None:
                self._runtime.samplers.replay_ended()
        await self._statuses.rebuild(self.name, detail, done=done)


async def _watch_trainer(trainer: TrainerGroup, driver: TrainerDriver) -> None:
    """Detect ranks that die or hang, even while nothing runs."""
    while True:
        await trainer.watch(PING_TIMEOUT_S)
        if trainer.broken is not None:
            driver.wake()
        await asyncio.sleep(PING_S)


class BaseSwitch:
    """Starts and stops of base models on demand, as an administrator asks, and their idle times."""

    def __init__(self, supervisors: Sequence[BaseSupervisor]) -> None:
        self._of = {each.name: each for each in supervisors}

    def change(self, asked: ChangeBaseRequest) -> str:
        """Start or stop a base model on demand, given by its canonical name; return what follows."""
        base = self._of[asked.base_model]
        return base.ask_start() if asked.action == "start" else base.ask_stop()

    def idle(self) -> dict[str, float]:
        """Return the seconds without requests of those on demand that run, by their names."""
        return {name: idle_s for name, each in self._of.items() if (idle_s := each.idle_s) is not None}
