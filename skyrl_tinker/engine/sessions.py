"""Cleans up behind clients: models of sessions that are over, weights that nobody samples, old results."""

import asyncio
import logging
import shutil
import time

from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.engine.sampler_driver import SamplerDriver
from skyrl_tinker.engine.samplers import Samplers
from skyrl_tinker.engine.trainer_driver import TrainerDriver
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.store import checkpoints, futures, models, sampling, sessions
from skyrl_tinker.store.checkpoints import CheckpointRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.wire.ids import ModelState, SessionId
from skyrl_tinker.wire.values import WeightVersion

SWEEP_S = 3.0
PURGE_S = 600.0
_ON_WORKERS = (ModelState.CREATING, ModelState.READY)
_log = logging.getLogger(__name__)


class SessionKeeper:
    def __init__(
        self,
        store: Store,
        trainer: TrainerDriver,
        sampler: SamplerDriver,
        samplers: Samplers,
        session_timeout_s: float,
        result_ttl_s: float,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._sampler = sampler
        self._samplers = samplers
        self._timeout_s = session_timeout_s
        self._ttl_s = result_ttl_s
        self._started = time.time()
        self._purged = 0.0

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except SamplerError as error:
                _log.info("clean-up goes on when the sampler is back: %s", error)

    async def sweep(self) -> None:
        for session in await self._over():
            await self._end(session)
        await self._drop_versions()
        await self._remove_checkpoints()
        await self._purge_results()

    async def _over(self) -> list[SessionId]:
        """Silence counts only while somebody listened: after a restart clients get the full time again."""
        now = time.time()
        listened = now - self._started > self._timeout_s
        async with self._store.read() as conn:
            return await sessions.expired(conn, now, self._timeout_s if listened else now)

    async def _end(self, session: SessionId) -> None:
        detail = f"no heartbeat for {self._timeout_s:.0f} s"
        held = await self._store.write(lambda conn: _finish(conn, session, detail))
        for model in held:
            self._trainer.release(model.key)

    async def _drop_versions(self) -> None:
        async with self._store.read() as conn:
            versions = await sampling.droppable_versions(conn)
        for version in versions:
            await self._drop(version)

    async def _drop(self, version: WeightVersion) -> None:
        await self._samplers.drop(version)
        await asyncio.to_thread(shutil.rmtree, version.directory, ignore_errors=True)
        await self._store.write(lambda conn: sampling.drop_version(conn, version.id))
        self._sampler.forget_targets()

    async def _remove_checkpoints(self) -> None:
        async with self._store.read() as conn:
            rows = await checkpoints.garbage(conn, time.time())
        for row in rows:
            await self._remove(row)

    async def _remove(self, row: CheckpointRow) -> None:
        version = await self._version(row)
        if version is not None:
            await self._drop(version)
        await asyncio.to_thread(shutil.rmtree, row.directory, ignore_errors=True)
        await self._store.write(lambda conn: checkpoints.forget(conn, row.id))

    async def _version(self, row: CheckpointRow) -> WeightVersion | None:
        if row.version_id is None:
            return None
        async with self._store.read() as conn:
            return await sampling.version(conn, row.version_id)

    async def _purge_results(self) -> None:
        now = time.time()
        if now - self._purged > PURGE_S:
            self._purged = now
            await self._store.write(lambda conn: futures.purge_results(conn, now - self._ttl_s))


async def _finish(conn: AsyncConnection, session: SessionId, detail: str) -> list[models.ModelRow]:
    """Nothing new comes from this session. Returns its models that may be on the workers."""
    await sessions.finish(conn, session, "expired", detail)
    rows = await models.of_session(conn, session)
    for row in rows:
        if row.state in (ModelState.LOST, ModelState.FAILED):
            await models.set_state(conn, row.key, ModelState.RELEASED, row.state_reason)
    return [row for row in rows if row.state in _ON_WORKERS]
