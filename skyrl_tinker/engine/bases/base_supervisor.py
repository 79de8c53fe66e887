"""Supervisor of one base model: starts its processes, and runs it beside the others."""

import asyncio
import logging
from collections.abc import Awaitable, Collection
from itertools import chain, repeat

from skyrl_tinker.engine.bases.base_runtime import BaseRuntime
from skyrl_tinker.engine.bases.base_statuses import BaseStatuses
from skyrl_tinker.engine.sampler.sleep import SleepControl
from skyrl_tinker.engine.trainer.trainer_driver import LOOK_S, PAUSES_S, TrainerDriver
from skyrl_tinker.errors import SkyrlTinkerError, root_cause
from skyrl_tinker.training.trainer_group import TrainerGroup

PING_S, PING_TIMEOUT_S = 2.0, 30.0
_log = logging.getLogger(__name__)


class BaseSupervisor:
    """Tries a base model that does not start again and again, and fails its requests, while others serve."""

    def __init__(self, runtime: BaseRuntime, driver: TrainerDriver | None, statuses: BaseStatuses) -> None:
        """`driver`: of its trainer, if it has one."""
        self._runtime = runtime
        self._name = runtime.facts.name
        self._driver = driver
        self._statuses = statuses
        self._why: str | None = None  # it does not start
        self._pause(f"base model {self._name} is being started")
        if driver is not None and runtime.samplers is not None:
            runtime.samplers.await_replay()

    async def run(self, resumed: Awaitable[object]) -> None:
        """Start the base model and, once the models are `resumed`, run it.

        Raises SkyrlTinkerError if neither it nor any other base model starts.
        """
        await self._start(resumed)
        runtime, driver = self._runtime, self._driver
        self._resume()
        async with asyncio.TaskGroup() as tasks:
            if (samplers := runtime.samplers) is not None:
                tasks.create_task(samplers.fleet.supervise(self._statuses.report, samplers.equip))
                sleep_control = SleepControl(samplers.fleet, samplers.drop_weights)
                tasks.create_task(runtime.placement.run(sleep_control))
            if runtime.trainer is not None and driver is not None:
                tasks.create_task(driver.run(self._report_rebuild))
                tasks.create_task(_watch_trainer(runtime.trainer, driver))

    async def _start(self, resumed: Awaitable[object]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, pause_s in enumerate(chain(PAUSES_S, repeat(PAUSES_S[-1])), 1):
                if (error := await self._failure(resumed)) is None:
                    break
                if not self._statuses.others_may_serve(self._name):
                    raise error
                await self._runtime.processes.end()
                _log.error("%s: the next try is in %.0f s: %s", self._name, pause_s, error)
                self._why = f"base model {self._name} does not start: {_last_line(error)}"
                await self._statuses.failed(self._name, self._why)
                if number == 2:  # a second try might have helped
                    tasks.create_task(self._refuse())
                await asyncio.sleep(pause_s)
            self._why = None
        await self._statuses.started(self._name)

    async def _failure(self, resumed: Awaitable[object]) -> SkyrlTinkerError | None:
        """Try to start; return what the start failed of."""
        error: BaseException | None = None
        try:
            await self._runtime.processes.start(self._report_parts)
            await resumed  # the check has files where those of an earlier engine are removed
            await self._runtime.processes.check()
        except* SkyrlTinkerError as group:
            error = root_cause(group)
        assert error is None or isinstance(error, SkyrlTinkerError)
        return error

    async def _refuse(self) -> None:
        """Fail all requests until the base model is up."""
        while self._why is not None:
            self._pause(f"{self._why}; other base models are unaffected", refuses=True)
            if self._driver is not None:
                await self._driver.refuse(self._why)
            await asyncio.sleep(LOOK_S)

    def _pause(self, why: str, *, refuses: bool = False) -> None:
        """Give requests a reason for their wait; samples fail at once if it `refuses`."""
        if self._runtime.samplers is not None:
            self._runtime.samplers.gate.close(why, refuses=refuses)
        if self._driver is not None:
            self._driver.paused = why

    def _resume(self) -> None:
        if self._runtime.samplers is not None:
            self._runtime.samplers.gate.open()
        if self._driver is not None:
            self._driver.paused = None

    async def _report_parts(self, parts: Collection[str]) -> None:
        await self._statuses.starting(self._name, parts)

    async def _report_rebuild(self, detail: str, *, done: bool = False, lost: bool = False) -> None:
        """Report the progress of bringing models back, as a driver's Report."""
        if done and self._runtime.samplers is not None:
            self._runtime.samplers.replay_ended()
        await self._statuses.rebuild(self._name, detail, done=done, lost=lost)


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
