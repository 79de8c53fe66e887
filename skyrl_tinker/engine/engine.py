"""The engine: starts up, runs its parts concurrently until one fails or it is stopped, and ends them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import psutil
from sqlalchemy.exc import OperationalError

from skyrl_tinker.engine.bases.base_statuses import CLEAN_UP, BaseStatuses
from skyrl_tinker.engine.compose import Environment, Parts, compose
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.ray_cluster import RayCluster
from skyrl_tinker.engine.start_up import StartUp, read_bases
from skyrl_tinker.errors import SkyrlTinkerError, root_cause
from skyrl_tinker.store import server_state
from skyrl_tinker.system.processes import freeze_gc, reap_orphans

PING_S = 2.0
STOP_S = 4.0
FAILED_S = 3.0  # how long a failed start stays visible before the process ends
_log = logging.getLogger(__name__)


class Engine:
    def __init__(self, env: Environment) -> None:
        self._env = env
        self._statuses: BaseStatuses | None = None
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
        return None if error is None else str(root_cause(error))

    async def _work(self) -> None:
        start_up = StartUp(self._env, await read_bases(self._env.store), self._shutdowns)
        await self._serve(compose(self._env, start_up.runtimes()), start_up)

    async def _serve(self, parts: Parts, start_up: StartUp) -> None:
        self._statuses = parts.statuses
        self._shutdowns.append(parts.http_server.close)
        async with asyncio.TaskGroup() as tasks:
            resumed = tasks.create_task(self._resume(parts, start_up))
            for base in parts.bases:
                tasks.create_task(base.run(resumed))
            for sampler_driver in parts.samples.drivers:
                tasks.create_task(sampler_driver.run())
            if parts.span_export is not None:
                self._shutdowns.append(parts.span_export.close)
                tasks.create_task(parts.span_export.run())
            tasks.create_task(_watch_ray(self._env.ray))
            tasks.create_task(parts.intake.run(await resumed))
            tasks.create_task(parts.cleanup.run())
            tasks.create_task(parts.deadlines.run())

    async def _resume(self, parts: Parts, start_up: StartUp) -> int:
        """Tidy up, and continue where an earlier engine stopped; returns the cursor of the intake."""
        await parts.statuses.report()
        await start_up.tidy_up()
        await parts.statuses.started(CLEAN_UP)
        await parts.warnings.clear()
        await parts.http_server.start()
        put = partial(server_state.put, key=server_state.ENGINE_ADDRESS, value=parts.http_server.address)
        await persistently(self._env.store.write, put)
        freeze_gc()
        return await parts.training.resume()

    async def _report_failure(self, error: BaseException, stop: asyncio.Event) -> None:
        """Report the cause; a failed start stays visible for FAILED_S before the supervisor's next try."""
        cause = root_cause(error)
        foreseen = isinstance(cause, SkyrlTinkerError)
        _log.error("the engine failed: %s", cause, exc_info=None if foreseen else cause)
        if self._statuses is None or not self._statuses.ready:
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


async def _watch_ray(ray: RayCluster) -> None:
    """Raise TrainerLostError once the cluster is gone. Reap its orphans."""
    own = [child.pid for child in psutil.Process().children()]
    while True:
        ray.require_alive()
        reap_orphans(known=own)
        await asyncio.sleep(PING_S)
