"""Supervisor of one base model: starts its processes, runs it beside the others, and starts it again."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Collection
from contextlib import nullcontext

from skyrl_tinker.engine.bases.base_room import BaseRoom
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime
from skyrl_tinker.engine.bases.base_statuses import ON_DEMAND, BaseStatuses
from skyrl_tinker.engine.sampler.sleep import SleepControl
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.errors import SkyrlTinkerError, TrainerLostError, root_cause
from skyrl_tinker.training.trainer_group import TrainerGroup

PAUSES_S = (1.0, 5.0, 30.0)
"""Time until the next try after each failure in a row."""
PING_S, PING_TIMEOUT_S = 2.0, 30.0
ROOM_IDLE_S = 60.0
"""Time without requests after which one on demand stops for another that lacks GPUs."""
LOOK_S = 1.0
"""Time between two looks whether one that is only sampled may stop."""
_log = logging.getLogger(__name__)


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
        self._name = runtime.facts.name
        self._driver = driver
        self._statuses = statuses
        self._room = room
        self._waits = ""  # why it does not start yet
        self._asked = _event_of(runtime, driver)
        self._failures = 0  # in a row
        self._rests = runtime.idle_s is not None  # it waits for a request that needs it
        self._runs = False  # it serves
        self._start_asked = self._stop_asked = False  # by an administrator
        self._pause(self._starting if runtime.idle_s is None else self._stopped)

    async def run(self, resumed: Awaitable[object]) -> None:
        """Start the base model and, once the models are `resumed`, run it.

        Raises SkyrlTinkerError if neither it nor any other base model starts.
        """
        async with nullcontext() if self._driver is None else self._driver.background:
            while True:
                if self._runtime.idle_s is not None:
                    await self._rest()
                lost = await self._live(resumed)
                await (self._stop() if lost is None else self._recover(lost))

    @property
    def name(self) -> str:
        return self._name

    @property
    def idle_s(self) -> float | None:
        """Seconds without requests of one on demand; None where it does not run, or always does."""
        if not self._runs or self._runtime.idle_s is None:
            return None
        samplers, driver = self._runtime.samplers, self._driver
        unsampled_s = math.inf if samplers is None else samplers.gate.idle_s
        return unsampled_s if driver is None else min(driver.idle_s, unsampled_s)

    def ask_start(self) -> str:
        """Start it without a request, if it is on demand; return what follows."""
        self._stop_asked = False
        if self._runs:
            return f"base model {self._name} runs"
        self._start_asked = True
        self._asked.set()
        return self._starting

    def ask_stop(self) -> str:
        """Stop it as soon as nothing needs it, if it is on demand; return what follows."""
        self._start_asked = False
        if self._rests:
            return self._stopped
        self._stop_asked = True
        return f"base model {self._name} stops once no request waits or runs"

    @property
    def _starting(self) -> str:
        return f"base model {self._name} is being started"

    @property
    def _stopped(self) -> str:
        return f"base model {self._name} is stopped: {ON_DEMAND}"

    async def _rest(self) -> None:
        """Wait for a request that needs the processes, also where those before it have failed."""
        self._rests = True
        while not self._is_asked():
            self._asked.clear()
            if self._driver is not None:
                self._driver.requests.accept()
            self._pause(self._stopped)
            if self._driver is not None:
                await self._driver.retire()
            await self._asked.wait()
        self._rests = False
        await self._room.enter(self._name, lambda: self.idle_s or 0.0, self._await_room)
        self._waits = ""
        self._pause(self._starting)
        await self._report_parts(self._runtime.processes.parts)

    async def _await_room(self, why: str) -> None:
        """Tell why it does not start yet, and release models that are due."""
        if why != self._waits:
            self._waits = why
            self._pause(f"base model {self._name} is stopped: {why}")
            await self._statuses.waits(self._name, why)
        if self._driver is not None:
            await self._driver.retire()

    def _is_asked(self) -> bool:
        samplers, driver = self._runtime.samplers, self._driver
        sampled = samplers is not None and samplers.gate.in_use
        return self._start_asked or sampled or (driver is not None and driver.requests.asked)

    async def _live(self, resumed: Awaitable[object]) -> SkyrlTinkerError | None:
        """Start the base model, and run it; return why it did not start, or was lost, None if it was idle."""
        lost: BaseException | None = None
        try:
            await self._runtime.processes.start(self._report_parts)
            await resumed  # the check has files where those of an earlier engine are removed
            await self._runtime.processes.check()
        except* SkyrlTinkerError as group:
            lost = root_cause(group)
        if lost is None:
            await self._accept()
            self._runs, self._start_asked = True, False
            try:
                await self._serve()
            except* TrainerLostError as group:
                lost = root_cause(group)
            self._runs = False
        assert lost is None or isinstance(lost, SkyrlTinkerError)
        return lost

    async def _serve(self) -> None:
        """Run the base model until it has been idle for long; then its requests wait."""
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
            self._pause(self._stopped)  # in the same step: no request comes in between
            for watch in watches:
                watch.cancel()

    def _may_stop(self, untrained_s: float) -> bool:
        """Return whether no request has come for long, of training not for `untrained_s`.

        Once it has been asked to stop: whether samplers serve none. While another waits for its GPUs a
        shorter time counts, which a script's own work between two requests seldom takes.
        """
        samplers, most_s = self._runtime.samplers, self._runtime.idle_s
        if most_s is None or (samplers is not None and samplers.gate.in_use):
            return False
        unsampled_s = math.inf if samplers is None else samplers.gate.idle_s
        if self._room.wants(self._name):
            most_s = min(most_s, ROOM_IDLE_S)
        return self._stop_asked or min(untrained_s, unsampled_s) >= most_s

    async def _until_idle(self) -> None:
        """Return, in the same step, once one without a trainer may stop."""
        while True:
            if self._may_stop(math.inf):
                return
            await asyncio.sleep(min(LOOK_S, self._runtime.idle_s or LOOK_S))

    async def _stop(self) -> None:
        """End all of it, with nothing under way. Raises TrainerLostError when Ray is gone."""
        if self._driver is not None:
            await self._driver.settle()
        await self._runtime.processes.end()
        self._room.leave(self._name)
        why = "as was asked" if self._stop_asked else "as it was idle"
        self._stop_asked = False
        self._failures = 0
        _log.info("%s: stopped, %s; %s", self._name, why, ON_DEMAND)
        await self._statuses.stopped(self._name)

    async def _recover(self, lost: SkyrlTinkerError) -> None:
        """End all of it, and wait for the next try."""
        if not self._statuses.others_may_serve(self._name):
            raise lost
        self._start_asked = False
        self._pause(self._starting)
        await self._runtime.processes.end()
        self._room.leave(self._name)
        pause_s = PAUSES_S[min(self._failures, len(PAUSES_S) - 1)]
        self._failures += 1
        _log.error("%s: the next try is in %.0f s: %s", self._name, pause_s, lost)
        why = f"base model {self._name} does not start: {_last_line(lost)}"
        await self._statuses.failed(self._name, why)
        if self._failures > 1:
            if self._runtime.samplers is not None:
                refusal = f"{why}; other base models are unaffected"
                self._runtime.samplers.gate.close(refusal, refuses=True)
            if self._driver is not None:
                await self._driver.requests.refuse(why)
        await asyncio.sleep(pause_s)

    def _pause(self, why: str) -> None:
        """Have requests wait, with the reason."""
        if (samplers := self._runtime.samplers) is not None:
            samplers.gate.close(why)
            if self._driver is not None:
                samplers.await_replay()
        if self._driver is not None:
            self._driver.requests.paused = why

    async def _accept(self) -> None:
        await self._statuses.started(self._name)
        if self._runtime.samplers is not None:
            self._runtime.samplers.gate.open()
        if self._driver is not None:
            self._driver.requests.accept()

    async def _report_parts(self, parts: Collection[str]) -> None:
        await self._statuses.starting(self._name, parts)

    async def _report_rebuild(self, detail: str, *, done: bool = False) -> None:
        """Report the progress of bringing models back, as a driver's Report."""
        if done:
            self._failures = 0
            if self._runtime.samplers is not None:
                self._runtime.samplers.replay_ended()
        await self._statuses.rebuild(self._name, detail, done=done)


def _event_of(runtime: BaseRuntime, driver: TrainerDriver | None) -> asyncio.Event:
    """Return the event that is set when a request waits."""
    if driver is not None:
        return driver.woken
    assert runtime.samplers is not None, "a base model is trained or sampled"
    return runtime.samplers.gate.asked


async def _watch_trainer(trainer: TrainerGroup, driver: TrainerDriver) -> None:
    """Detect ranks that die or hang, even while nothing runs."""
    while True:
        await trainer.watch(PING_TIMEOUT_S)
        if trainer.broken is not None:
            driver.wake()
        await asyncio.sleep(PING_S)


def _last_line(error: SkyrlTinkerError) -> str:
    """Return the end of a text that may be a log's."""
    return str(error).rstrip().rpartition("\n")[2].strip()
