"""Clean-up: models and samples of sessions that are over, unused weights, deleted checkpoints, old rows."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.domain.units import GB
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.bases.train_dispatch import TrainDispatch
from skyrl_tinker.engine.recovery import leftovers
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.suspends import Suspends
from skyrl_tinker.engine.upkeep.purge import Purge
from skyrl_tinker.engine.upkeep.upkeep_step import Step
from skyrl_tinker.storage.storage_port import LOCAL_DISK, InUse, Storage
from skyrl_tinker.store import checkpoint_records, model_records, session_records, weight_versions
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import in_disk_thread, in_transfer_thread

COMMIT_S = 60.0
"""Longest time from the time stamp in a row to the commit that makes it visible."""
EVICT_S = 300.0
DISCARD_S = 86_400.0
CHECKPOINTS = "[0-9]*/*/*"
"""Pattern of directories of checkpoints: model, kind, save."""


@dataclass(eq=False)
class Cleanup:
    _store: Store
    _trainer: TrainDispatch
    _samples: SampleDispatch
    _is_loading: Callable[[str], bool]
    _versions: EphemeralVersions
    settings: InitVar[Settings]
    _storage: Storage = LOCAL_DISK

    def __post_init__(self, settings: Settings) -> None:
        self._timeout_s, self._parked_s = settings.timeouts.session_s, settings.retention.history_s
        self._listening_since = self._store.now()
        self._ended_until = 0.0  # no samples are left of sessions finished before this
        self._garbage_until = 0  # id of the last deleted checkpoint of the last sweep, if there may be more
        self._suspends = Suspends(self._store.now)
        purge = Purge(self._store, settings)
        self._steps = (
            Step("expired sessions", self._end_expired_sessions),
            Step("samples of finished sessions", self._end_samples),
            Step("unused weights", self._versions.sweep),
            Step("deleted checkpoints", self._remove_checkpoints),
            Step("old rows", purge.run_now, purge.every_s),
            *storage_steps(self._store, self._storage, settings.checkpoint_cache_gb, self._is_loading),
        )

    async def run(self) -> None:
        """Sweep indefinitely. No step waits for another: each may be slow, or fail repeatedly."""
        async with asyncio.TaskGroup() as tasks:
            for step in self._steps:
                tasks.create_task(step.repeat())

    async def sweep(self) -> None:
        """Run each step once."""
        for step in self._steps:
            await step.tried()

    async def _end_expired_sessions(self) -> None:
        detail = f"no heartbeat for {self._timeout_s:.0f} s"
        for session in await self._expired_sessions():
            for model in await self._store.write(partial(_finish, session=session, detail=detail)):
                self._trainer.release(model.key, model.base_model)

    async def _expired_sessions(self) -> list[SessionId]:
        """Return the sessions without a heartbeat.

        After a restart, and after the machine was suspended, clients get the full time again.
        """
        now = self._store.now()
        if self._suspends.noticed():
            self._listening_since = now
        listened = now - self._listening_since > self._timeout_s
        timeout_s = self._timeout_s if listened else now
        return await self._store.fetch(
            lambda conn: session_records.list_expired(conn, now, timeout_s, self._parked_s)
        )

    async def _end_samples(self) -> None:
        """Stop samples of finished sessions: nobody waits for them, and they may take minutes."""
        now, since = self._store.now(), self._ended_until - COMMIT_S
        reasons = await self._store.fetch(lambda conn: session_records.finish_reasons(conn, since))
        if reasons:
            await self._samples.end_sessions(reasons)
        self._ended_until = now

    async def _remove_checkpoints(self) -> None:
        """Remove some, the next ones each time: others are not to wait for any that stays a while."""
        now, after = self._store.now(), self._garbage_until
        rows = await self._store.fetch(lambda conn: checkpoint_records.list_garbage(conn, now, after))
        self._garbage_until = rows[-1].id if len(rows) == checkpoint_records.AT_ONCE else 0
        for row in rows:
            if not self._is_loading(row.directory):
                await Step(f"checkpoint {row.name}", partial(self._remove, row)).tried()

    async def _remove(self, row: CheckpointRow) -> None:
        """Remove the row before the directory on this host: a save may take its name once it is free."""
        version = await self._version(row)
        if version is None or await self._versions.retire(version):
            await in_transfer_thread(self._storage.remove, Path(row.directory))  # the next sweep retries it
            await self._store.write(lambda conn: checkpoint_records.mark_removed(conn, row.id))
            await in_disk_thread(_remove_directory, Path(row.directory), row.id)

    async def _version(self, row: CheckpointRow) -> WeightVersion | None:
        version_id = row.version_id
        if version_id is None:
            return None
        return await self._store.read(lambda conn: weight_versions.published_version(conn, version_id))


def _remove_directory(directory: Path, number: int) -> None:
    """Remove a directory after an atomic rename: if this engine dies here, the next one sweeps the rest."""
    doomed = directory.with_name(f".{directory.name}.{number}.tmp")
    with suppress(FileNotFoundError):  # it was removed by hand
        directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _finish(conn: Connection, session: SessionId, detail: str) -> list[model_records.ModelRow]:
    """Finish a session. Returns its models that may be on the workers."""
    session_records.finish(conn, session, "expired", detail)
    return [row for row in model_records.list_for_session(conn, session) if row.state in session_records.HELD]


def storage_steps(store: Store, storage: Storage, cache_gb: float | None, in_use: InUse) -> Iterator[Step]:
    """Yield the upkeep of object storage: of its cache on this host, and of leftovers of dead hosts in it.

    `cache_gb`: limit of the cache; directories `in_use` are not evicted. None: no limit. The steps raise
    StorageError while the storage is away.
    """
    if cache_gb is not None:
        evict = partial(in_transfer_thread, storage.evict, cache_gb * GB, in_use)
        yield Step("the cache of checkpoints", evict, EVICT_S)

    async def discard_left() -> None:
        """Remove directories that dead hosts stored in part, or did not record."""
        saves = leftovers.saves_of(await in_transfer_thread(storage.listed, CHECKPOINTS))
        abandoned = await store.write(partial(leftovers.list_abandoned, saves=saves)) if saves else ()
        await in_transfer_thread(storage.discard_old, CHECKPOINTS, abandoned)

    yield Step("files of dead hosts", discard_left, DISCARD_S)
