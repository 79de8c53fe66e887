"""Snapshots of models in training: often enough for a short replay, seldom enough to cost little.

A snapshot is a checkpoint that the server makes for itself, directly after a step or a load, when there are
no gradients. Its files are written during training; its row is committed after the units that it contains.
Several small models are copied in one call to the ranks, as a call takes longer than such a copy.
"""

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.config import Recovery
from skyrl_tinker.domain.ids import ModelKey, ModelState
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.recovery.unkept_work import Unkept, UnkeptWork
from skyrl_tinker.engine.scheduling.priorities import Share
from skyrl_tinker.engine.unit_commits import PendingWrites, UnitCommits, UnitEnd
from skyrl_tinker.errors import SkyrlTinkerError, TrainerError
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.store import model_records
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.replay import snapshot_records, unit_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.atomic_directory import atomic_directory, link, storage_errors
from skyrl_tinker.system.off_loop import (
    in_disk_thread,
    in_load_thread,
    in_load_turn,
    in_recovery_thread,
    in_transfer_thread,
)
from skyrl_tinker.training.trainer_group import CapturedState, TrainerGroup

GRACE_S = 0.5
"""Seconds of trainer time that snapshots may take in one go, before their share counts."""
MODELS_AT_ONCE, BYTES_AT_ONCE = 16, 256 << 20
"""Bounds of the models copied in one call; a larger model is copied alone."""
UPLOADS = 4
ALL = 1 << 62
_log = logging.getLogger(__name__)

KeepSampled = Callable[[ModelKey], Awaitable[None]]
"""Copy to disk a model's weights that clients sample: replay cannot restore those before a snapshot."""


@dataclass(eq=False)
class SnapshotKeeper:
    _store: Store
    _trainer: TrainerGroup
    _commits: UnitCommits
    _root: Path
    _keep_sampled: KeepSampled
    _storage: Storage
    _recovery: Recovery
    _saves_until: Callable[[ModelKey, int], bool]

    def __post_init__(self) -> None:
        self.work = UnkeptWork()
        self._tried: dict[ModelKey, int] = {}  # seq_id of the last try of a snapshot
        self._dropped: dict[ModelKey, int] = {}  # seq_id up to which no forward has a body
        self._writing: dict[ModelKey, asyncio.Task[None]] = {}
        self._pending = PendingWrites()
        self.replaying = asyncio.Lock()
        """Held by a replay: no other snapshot becomes a model's meanwhile, and what it reads stays."""
        self._uploads = asyncio.Semaphore(UPLOADS)  # they share threads with requests of clients
        self._turn = asyncio.Lock()  # for the ranks' disk: a client's save waits for one snapshot at most
        self._removals: set[asyncio.Task[None]] = set()
        self._forgetting = asyncio.Lock()
        self._room_s, self._looked = GRACE_S, time.monotonic()
        self.taken = 0
        self.spent_s = 0.0  # of the trainer's time, so far

    @property
    def would_help(self) -> bool:
        """True if a snapshot would make a replay shorter and none is being written."""
        written = all(task.done() for task in self._writing.values())
        return written and bool(self._ready())

    @property
    def owed(self) -> bool:
        """True if a snapshot is to be tried: one that failed is not before its model has run again."""
        return any(map(self._is_untried, self._ready()))

    def _ready(self) -> dict[ModelKey, Unkept]:
        """Return the models that a snapshot would help: one with an unfinished save before it is not kept."""
        ready = self.work.ready().items()
        return {model: each for model, each in ready if not self._saves_until(model, each.clean_at)}

    def _is_untried(self, model: ModelKey) -> bool:
        return self._tried.get(model) != self.work.by_model[model].clean_at

    @property
    def stored(self) -> bool:
        """True if snapshots are in a storage besides this disk."""
        return self._storage is not LOCAL_DISK

    async def settle(self) -> None:
        """Wait until no snapshot needs the ranks or, without a storage, until all are recorded."""
        await self._pending.settle()

    def reset(self) -> None:
        """Forget the models' work since their snapshots: a replay records it again."""
        self.work.reset()
        self._tried.clear()

    async def take_due(self) -> None:
        """Take a snapshot if a replay would take long. Raises TrainerError: the ranks are broken.

        The share is one of all time, not of busy time: with short work of many models the trainer is never
        idle for long, and each model needs a snapshot.
        """
        now = time.monotonic()
        self._room_s = min(GRACE_S, self._room_s + self._recovery.snapshot_share * (now - self._looked))
        self._looked = now
        if self.work.replay_seconds > self._recovery.replay_s / 2 and self._room_s > 0:
            spent_s = self.spent_s
            await self.take_largest()
            self._room_s -= self.spent_s - spent_s

    async def take_largest(self) -> None:
        """Take snapshots of the models with the longest replay, unless one is being written.

        Raises TrainerError: the ranks are broken.
        """
        if not self.would_help:
            return
        ready = self._ready()
        order = {model: (self._is_untried(model), self.work.replay_s_of(model)) for model in ready}
        models = nlargest(MODELS_AT_ONCE, order, key=order.__getitem__)
        room = self._trainer.captured
        count = room.fitting([room.size(model, optimizer=True) for model in models])
        self._tried |= {model: ready[model].clean_at for model in models[:1]}
        if not (models := models[:count]):
            return
        started = time.monotonic()
        try:
            captured = await self._trainer.capture_states(models, BYTES_AT_ONCE)
        except TrainerError:
            raise
        except SkyrlTinkerError as error:
            _log.warning("no snapshot of model %s: %s", models[0], error)
            return
        finally:
            self.spent_s += time.monotonic() - started
        self._tried |= {model: ready[model].clean_at for model in captured}
        self._writing.clear()
        for model, state in captured.items():
            since = Unkept(clean_at=ready[model].clean_at)
            if model in self.work.by_model:
                self.work.begin(model, since)
            task = self._writing[model] = asyncio.create_task(self._write(model, state, ready[model], since))
            self._pending.follow(id(state), task)

    async def _write(self, model: ModelKey, captured: CapturedState, covered: Unkept, since: Unkept) -> None:
        """Write and record a snapshot, and remove the previous one; after a failure, replay uses that.

        `covered`, `since`: the model's work until it was captured, and since then.
        """
        seq_id = covered.clean_at
        directory = self._new_directory(model, seq_id)
        row = SnapshotRow(seq_id, str(directory), optimizer=True)
        try:
            await in_disk_thread(directory.parent.mkdir, parents=True, exist_ok=True)
            async with self._turn:
                await self._trainer.persist_state(captured, row.directory)
            await self._commits.add(UnitEnd({}, (partial(_require_written, model=model, until=seq_id),)))
            await captured.drop()
            if self.stored:
                self._pending.note_here(id(captured))
            async with self._uploads:
                await in_transfer_thread(self._storage.store, directory)
            await self._keep_sampled(model)
            async with self.replaying:
                await self._commits.add(UnitEnd({}, (partial(_put, model=model, row=row),)))
        except Exception as error:  # of ranks, disk, storage or store, or unforeseen: training goes on
            foreseen = isinstance(error, SkyrlTinkerError | OSError | OperationalError)
            _log.warning(
                "the snapshot of model %s was not kept: %s: %s",
                model,
                type(error).__name__,
                error,
                exc_info=None if foreseen else error,
            )
            await captured.drop()
            await self.discard(row)
            if self.work.by_model.get(model) is since:  # else a replay has recorded it again
                self.work.add(since, covered.requests, covered.ranks_ns)
            return
        self.taken += 1
        if (found := self.work.by_model.get(model)) is not None and found.clean_at == seq_id:
            self.work.begin(model, Unkept(clean_at=seq_id))  # a replay recorded it while it was stored
        await self._forget_before(model, row)

    async def link(
        self, model: ModelKey, seq_id: int, source: str, origin: Storage, share: Share, *, optimizer: bool
    ) -> SnapshotRow:
        """Keep a checkpoint that will be loaded, by hard links: it may be deleted later. Raises StorageError.

        `origin`: the storage of the checkpoint. `share`: whose turns of load threads it takes.
        """
        row = SnapshotRow(seq_id, str(self._new_directory(model, seq_id)), optimizer)
        kept, target = Path(source), Path(row.directory)
        try:
            with storage_errors("the checkpoint could not be kept for a later replay"):
                await in_load_turn(share, partial(in_load_thread, _link_files, kept, target))
                copy = partial(in_load_thread, self._storage.store_copy, target, kept, origin)
                await in_load_turn(share, copy)
                await self._keep_sampled(model)
        except BaseException:  # of a disk or storage, or cancelled: no row will name its files
            await self.discard(row)
            raise
        return row

    async def discard(self, row: SnapshotRow) -> None:
        """Remove the files of a linked checkpoint that could not be loaded."""
        await self._remove(Path(row.directory))

    async def fetch(self, row: SnapshotRow) -> None:
        """Fetch its files to this host, however much clients load and export.

        Raises StorageError; StorageAwayError if a later try may succeed.
        """
        if not self.stored:  # they are here
            return
        await in_recovery_thread(self._storage.fetch, Path(row.directory))

    def loaded(self, model: ModelKey, row: SnapshotRow) -> Op[Any]:
        """Return the op that makes a linked checkpoint the model's snapshot."""
        self.work.begin(model, Unkept(clean_at=row.seq_id))
        return partial(snapshot_records.put, model=model, snapshot=row)

    async def sweep(self) -> None:
        """Remove leftovers of an earlier engine: files without a row, and all files of ended models."""

        def kept(conn: Connection) -> tuple[set[ModelKey], dict[ModelKey, str]]:
            snapshots = snapshot_records.all_directories(conn)
            alive = model_records.list_in_states(conn, ModelState.READY, ModelState.PARKED)
            live = {row.key for row in alive}
            return {*snapshots, *unit_records.models_with_bodies(conn), *models} - live, snapshots

        try:
            found = await self._directories(self._root)  # first: later directories must stay
            models = {ModelKey(int(path.name)) for path in await in_disk_thread(_of_models, self._root)}
        except OSError as error:
            _log.warning("snapshots may stay that nobody needs, until the next start: %s", error)
            return
        dead, snapshots = await persistently(self._store.fetch, kept)
        for model in sorted(dead):
            await self.forget(model)
        recorded = {_name(Path(each)) for each in snapshots.values()}
        for path in sorted(found):
            if _name(path) not in recorded:
                await self._remove(path)

    async def remove_replaced(self, model: ModelKey) -> None:
        """Remove files and bodies that the model's committed snapshot has replaced, and surplus forwards."""
        row = await persistently(self._store.read, partial(snapshot_records.find, model=model))
        if row is None:
            await self._drop_bodies(model, 0)
        else:
            await self._forget_before(model, row)

    def pause(self, model: ModelKey) -> None:
        """Take no more snapshots of a model that has left the ranks."""
        self.work.drop(model)
        self._tried.pop(model, None)

    async def forget(self, model: ModelKey) -> None:
        """Remove all files and records of a model that has ended, and is paused.

        One model at a time: many may end together, each with many files. Waits for a snapshot of it that is
        still being written or stored.
        """
        if (writing := self._writing.get(model)) is not None:
            await asyncio.wait([writing])
        async with self._forgetting:
            await persistently(self._store.write, lambda conn: snapshot_records.drop(conn, model))
            await self._drop_bodies(model, ALL)
            self._dropped.pop(model, None)
            await self._remove(self._root / str(model))

    async def _forget_before(self, model: ModelKey, row: SnapshotRow) -> None:
        await self._drop_bodies(model, row.seq_id)
        try:
            found = await self._directories(self._root / str(model))
        except OSError as error:
            _log.warning("older snapshots of model %s may stay until the next one: %s", model, error)
            return
        for path in sorted(found):
            if int(path.name.partition(".")[0]) < row.seq_id:  # newer ones may yet be recorded
                await self._remove(path)

    async def _directories(self, below: Path) -> set[Path]:
        """Return the directories of snapshots, of one model or all, here and in storage."""

        def find() -> set[Path]:
            own = _of_models(below) if below == self._root else [below]
            pattern = "*" if below == self._root else "[0-9]*"
            here = {path for directory in own for path in directory.glob(pattern)}
            return here | {*self._storage.listed("[0-9]*/[0-9]*", below)}

        return await in_transfer_thread(find)

    async def _remove(self, path: Path) -> None:
        """Remove a directory here and, if possible, from storage: leftovers only cost space."""
        await in_disk_thread(shutil.rmtree, path, ignore_errors=True)
        removal = asyncio.create_task(in_transfer_thread(self._storage.discard, path))  # may take long
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _drop_bodies(self, model: ModelKey, until: int) -> None:
        def op(conn: Connection) -> int | None:
            return unit_records.drop_bodies(conn, model, until, self._dropped.get(model, 0))

        while (dropped := await persistently(self._store.write, op)) is None:
            pass
        self._dropped[model] = dropped

    def _new_directory(self, model: ModelKey, seq_id: int) -> Path:
        """Return a directory never used before: an earlier attempt may still be removed."""
        return self._root / str(model) / f"{seq_id}.{secrets.token_hex(4)}"


def _name(directory: Path) -> tuple[str, ...]:
    """Return the end of its path: the root may have several names."""
    return directory.parts[-2:]


def _of_models(root: Path) -> list[Path]:
    return [path for path in root.glob("[0-9]*") if path.name.isdecimal()]  # other directories are not ours


def _require_written(conn: Connection, model: ModelKey, until: int) -> None:
    """Raise SkyrlTinkerError if a save before `until` has not finished: it may have to be repeated."""
    if unit_records.unfinished_until(conn, model, until):
        raise SkyrlTinkerError("a save from before it is still being written")


def _put(conn: Connection, model: ModelKey, row: SnapshotRow) -> None:
    newest = snapshot_records.find(conn, model)
    if newest is not None and newest.seq_id > row.seq_id:
        raise SkyrlTinkerError("a checkpoint was loaded meanwhile")
    snapshot_records.put(conn, model, row)


def _link_files(source: Path, directory: Path) -> None:
    with atomic_directory(directory) as staging:
        for path in source.iterdir():
            link(path, staging / path.name)
