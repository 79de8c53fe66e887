"""The engine: starts up, runs its parts concurrently until one fails or it is stopped, and ends them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import psutil
from sqlalchemy.exc import OperationalError

from skyrl_tinker.engine.bases.base_statuses import BaseStatuses
from skyrl_tinker.engine.compose import BaseRuntime, Environment, Parts, compose
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.ray_cluster import RayCluster
from skyrl_tinker.engine.sampler.sleep import SleepControl
from skyrl_tinker.engine.start_up import StartUp, read_bases
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.store import server_state
from skyrl_tinker.system.processes import freeze_gc, reap_orphans
from skyrl_tinker.training.trainer_group import TrainerGroup

PING_S, PING_TIMEOUT_S = 2.0, 30.0
STOP_S = 4.0
FAILED_S = 3.0  # how long a failed start stays visible before the process ends
_log = logging.getLogger(__name__)


class Engine:
    def __init__(self, env: Environment) -> None:
        self._env = env
        self._ready = False
        self._shutdowns: list[Callable[[], Awaitable[None]]] = []

    async def run(self, stop: asyncio.Event) -> str | None:
        """Run until `stop` is set, or until a failure that needs a new engine: returns its cause."""
        work = asyncio.create_task(self._work())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        error = work.exception() if work.done() else None
        if error is not None:
            await self._report_failure(error, stop)
        for task in (work, stopped):
            task.cancel()
        await asyncio.wait((work, stopped))
        if self._env.ray.answers():  # else its processes are killed as descendants
            await self._shut_down()
        return None if error is None else str(_root_cause(error))

    async def _work(self) -> None:
        bases = await read_bases(self._env.store)
        runtimes = await StartUp(self._env, bases, self._shutdowns).bring_up()
        await self._serve(compose(self._env, runtimes), runtimes)

    async def _serve(self, parts: Parts, runtimes: Sequence[BaseRuntime]) -> None:
        await parts.warnings.clear()
        self._shutdowns.append(parts.http_server.close)
        await parts.http_server.start()
        address = parts.http_server.address
        await persistently(
            lambda: self._env.store.write(
                lambda conn: server_state.put(conn, server_state.ENGINE_ADDRESS, address)
            )
        )
        freeze_gc()
        cursor = await parts.training.resume()
        fleets = {each.facts.name: each.fleet for each in runtimes}
        drivers = {driver.facts.name: driver for driver in parts.training.drivers}
        statuses = BaseStatuses(self._env.status, fleets, list(drivers))
        async with asyncio.TaskGroup() as tasks:
            if parts.span_export is not None:
                self._shutdowns.append(parts.span_export.close)
                tasks.create_task(parts.span_export.run())
            tasks.create_task(parts.intake.run(cursor))
            tasks.create_task(parts.cleanup.run())
            tasks.create_task(parts.deadlines.run())
            for sampler_driver in parts.samples.drivers:
                tasks.create_task(sampler_driver.run())
            for runtime in runtimes:
                tasks.create_task(runtime.fleet.supervise(statuses.report, runtime.samplers.equip))
                sleep_control = SleepControl(runtime.fleet, runtime.samplers.drop_weights)
                tasks.create_task(runtime.placement.run(sleep_control))
                if runtime.trainer is not None:
                    runtime.samplers.await_replay()
                    driver = drivers[runtime.facts.name]
                    tasks.create_task(driver.run(partial(self._report_rebuild, statuses, runtime)))
                    tasks.create_task(_watch_trainer(runtime.trainer, driver))
            tasks.create_task(_watch_ray(self._env.ray))

    async def _report_rebuild(
        self,
        statuses: BaseStatuses,
        runtime: BaseRuntime,
        detail: str,
        *,
        done: bool = False,
        lost: bool = False,
    ) -> None:
        """Report the progress of bringing models back, as a driver's Report."""
        if done:
            runtime.samplers.replay_ended()
        await statuses.rebuild(runtime.facts.name, detail, done=done, lost=lost)
        if statuses.ready and not self._ready:
            self._ready = True
            _log.info("ready")

    async def _report_failure(self, error: BaseException, stop: asyncio.Event) -> None:
        """Report the cause; a failed start stays visible for FAILED_S before the supervisor's next try."""
        cause = _root_cause(error)
        foreseen = isinstance(cause, SkyrlTinkerError)
        _log.error("the engine failed: %s", cause, exc_info=None if foreseen else cause)
        if not self._ready:
            with suppress(OperationalError):  # a full disk: the log has the cause
                await self._env.status.report("failed", str(cause))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), FAILED_S)

    async def _shut_down(self) -> None:
        """End the backends; processes that do not end in time are killed with all other descendants."""
        tasks = [asyncio.create_task(_end(shutdown)) for shutdown in self._shutdowns]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)


async def _end(shutdown: Callable[[], Awaitable[None]]) -> None:
    try:
        await shutdown()
    except SkyrlTinkerError as error:  # it is dead already
        _log.info("while ending: %s", error)


async def _watch_trainer(trainer: TrainerGroup, driver: TrainerDriver) -> None:
    """Detect ranks that die or hang, even while nothing runs."""
    while True:
        await trainer.watch(PING_TIMEOUT_S)
        if trainer.broken is not None:
            driver.wake()
        await asyncio.sleep(PING_S)


async def _watch_ray(ray: RayCluster) -> None:
    """Raise TrainerLostError once the cluster is gone. Reap its orphans."""
    own = [child.pid for child in psutil.Process().children()]
    while True:
        ray.require_alive()
        reap_orphans(known=own)
        await asyncio.sleep(PING_S)


def _root_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
