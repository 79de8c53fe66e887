"""The flow of every kind of save.

* A name is reserved from before the store is asked for it until the answer is committed.
* The weights are captured on the trainer, which then trains on; they are written under a hidden name.
* A checkpoint is in storage, if there is one, before it is recorded.
* The rows of the checkpoint and the answer are one commit.
* A save waits while the disk is full, or the storage away. One that fails leaves no files; its name is free.
* Each try has its own directory, and deletes it only if the database does not have it: a commit may have
  succeeded despite an error, and a server that was taken over may go on writing.
"""

import asyncio
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ALL_OWNERS, CheckpointKind
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.engine.outbox import RETRY_S, failure_of, json_answer, persistently, when_possible
from skyrl_tinker.engine.unit_commits import PendingWrites, UnitCommits, UnitEnd
from skyrl_tinker.errors import DiskFullError, TrainerError, UserError
from skyrl_tinker.protocol.stored_requests import SaveExternalBody, SaveSamplerBody, SaveWeightsBody
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store import checkpoint_records, model_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint, expiry
from skyrl_tinker.store.futures.finish import finish_all
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.atomic_directory import make_durable, staging_of, storage_errors
from skyrl_tinker.system.off_loop import in_disk_thread, in_transfer_thread
from skyrl_tinker.training.trainer_group import CapturedState, TrainerGroup

B = TypeVar("B", SaveWeightsBody, SaveExternalBody, SaveSamplerBody)


@dataclass(frozen=True, slots=True)
class Save(Generic[B]):
    """A model's weights at the save's turn, to be written to `directory`."""

    row: QueuedRow
    model: ModelRow
    body: B
    path: TinkerPath | None  # None: ephemeral
    directory: Path
    captured: CapturedState

    @property
    def staging(self) -> Path:
        return staging_of(self.directory)

    def steps(self, conn: Connection) -> int:
        """Return how many steps the weights had taken: later ones may be recorded by now."""
        assert self.row.seq_id is not None, "saves are numbered"
        return model_records.steps_taken(conn, self.model.key, self.row.seq_id)

    def checkpoint(self, conn: Connection, size: int, **others: Any) -> NewCheckpoint:
        assert self.path is not None, "ephemeral weights are not a checkpoint"
        return NewCheckpoint(
            model_key=self.model.key,
            kind=self.path.kind,
            name=self.path.name,
            directory=str(self.directory),
            base_model=self.model.base_model,
            spec=self.model.spec,
            size_bytes=size,
            expires_at=expiry(conn, self.body.ttl_seconds),
            steps=self.steps(conn),
            **others,
        )


S = TypeVar("S", bound=Save[Any])


@dataclass(eq=False)
class SaveFlow(ABC, Generic[S]):
    """Flow of one kind of save. `pending`: records when a save needs the ranks no more."""

    _store: Store
    _trainer: TrainerGroup
    _commits: UnitCommits
    _pending: PendingWrites
    _root: Path
    _storage: Storage

    def __post_init__(self) -> None:
        self._reserved: set[TinkerPath | None] = set()

    def persisting(self, path: TinkerPath) -> bool:
        """Return whether this checkpoint is being saved."""
        return path in self._reserved

    async def persist(self, save: S) -> bool:
        """Write, record and answer, also with a failure. Returns whether the save succeeded.

        If a rank dies with the weights, the save stays unanswered: replay repeats it.
        """
        try:
            return await self._answer(save)
        finally:
            await self._free(save)
            self._reserved.discard(save.path)

    async def _answer(self, save: S) -> bool:
        try:
            size = await self._write_with_room(save)
            self._pending.note_here(save.row.id)
            if save.path is not None:
                await when_possible(in_transfer_thread, self._storage.store, save.directory)
            await self._commit(save, size)
        except TrainerError:
            await self._discard(save)
            return False
        except Exception as error:  # of ranks, disk, storage or commit, or unforeseen: the request's result
            failure = failure_of(error)  # logged before the files' deletion, which may wait or be cut off
            await self._discard(save)
            await self._commits.add(UnitEnd({save.row.id: failure}))
            return False
        return True

    @asynccontextmanager
    async def _reserving(self, path: TinkerPath | None, *, overwrite: bool = False) -> AsyncIterator[None]:
        """Reserve the name until `persist` frees it, or here if the block fails. Raises UserError."""
        if path is None:
            yield
            return
        if path in self._reserved:
            raise UserError(f"checkpoint {path} is being saved by an earlier request: choose another name")
        self._reserved.add(path)
        try:
            if not overwrite:
                await self._require_new(path)
            yield
        except BaseException:  # refused, failed or cancelled: the name is free again
            self._reserved.discard(path)
            raise

    async def _require_new(self, path: TinkerPath) -> None:
        named = ALL_OWNERS, path.model_id, path.kind, path.name
        existing = await persistently(self._store.read, lambda conn: checkpoint_records.find(conn, *named))
        if existing is not None:
            replacing = ", or save with overwrite" if path.kind is CheckpointKind.WEIGHTS else ""
            raise UserError(f"checkpoint {path} exists: choose another name or delete it{replacing}")

    def _new_directory(self, row: QueuedRow, model: ModelRow, path: TinkerPath) -> Path:
        """Return a new directory. `leftovers` finds those that were not recorded."""
        name = f"{path.name}~{row.id}.{secrets.token_hex(4)}"
        return self._root / str(model.key) / path.kind / name

    @abstractmethod
    async def _write(self, save: S) -> int:
        """Make the directory appear, complete; returns its size in bytes.

        After DiskFullError it may be called again, if there is no directory yet.
        """

    async def _write_with_room(self, save: S) -> int:
        try:
            return await self._write(save)
        except DiskFullError:
            await asyncio.sleep(RETRY_S)
        return await when_possible(self._write_again, save)

    async def _write_again(self, save: S) -> int:
        if not await in_disk_thread(save.directory.exists):
            return await self._write(save)
        with storage_errors("the weights could not be made durable"):  # an earlier try has renamed the files
            return await in_disk_thread(make_durable, save.directory)

    async def _free(self, save: S) -> None:
        """Free the capture in the ranks' memory."""
        await save.captured.drop()

    @abstractmethod
    def _record(self, conn: Connection, save: S, size: int) -> Mapping[str, Any]:
        """Add the save's rows; returns the fields of its answer."""

    async def _commit(self, save: S, size: int) -> None:
        def op(conn: Connection) -> None:
            if self._recorded(conn, save):  # by a commit whose answer was lost
                return
            fields = self._record(conn, save, size)
            finish_all(conn, {save.row.id: json_answer({**fields, "type": save.row.kind})})

        await self._commits.add(UnitEnd({}, (op,), answered=(save.row.id,)))

    def _recorded(self, conn: Connection, save: S) -> bool:
        """Return whether `_record` was committed."""
        return checkpoint_records.is_recorded(conn, save.model.key, str(save.directory))

    async def _discard(self, save: S) -> None:
        """Delete the files of a failed save."""
        if not await persistently(self._store.read, lambda conn: self._recorded(conn, save)):
            await self._remove(save)

    async def _remove(self, save: S) -> None:
        if save.path is not None:
            await in_transfer_thread(self._storage.discard, save.directory)
        for directory in (save.staging, save.directory):
            await in_disk_thread(shutil.rmtree, directory, ignore_errors=True)
