"""save_weights: captured on the trainer, which then goes on; written, recorded and answered meanwhile."""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.engine.outbox import Outbox, failure_of, json_answer
from skyrl_tinker.engine.saves.checkpoint_names import free_directory, require_free
from skyrl_tinker.protocol.stored_requests import SaveWeightsBody
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint, expiry
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import CapturedState, TrainerGroup


@dataclass(frozen=True, slots=True)
class Saving:
    """A model's state as it was when the save had its turn, on its way to `directory`."""

    row: QueuedRow
    model: ModelRow
    body: SaveWeightsBody
    captured: CapturedState
    directory: Path

    @property
    def path(self) -> TinkerPath:
        return _path(self.model, self.body)


class Saver:
    """Between `capture` and the end of `persist` the model may train, but neither save nor load: so its
    saves end in their order, and one of them at a time is in the host's memory. It may be released.
    """

    def __init__(self, store: Store, trainer: TrainerGroup, outbox: Outbox, checkpoint_root: Path) -> None:
        self._store = store
        self._trainer = trainer
        self._outbox = outbox
        self._root = checkpoint_root
        self._persisting: set[TinkerPath] = set()

    def persisting(self, path: TinkerPath) -> bool:
        """Whether this checkpoint is being written."""
        return path in self._persisting

    async def capture(self, row: QueuedRow, model: ModelRow, body: SaveWeightsBody) -> Saving:
        """The trainer's part. Raises SkyrlTinkerError. `persist` must follow."""
        path = _path(model, body)
        if not body.overwrite:
            await require_free(self._store, path)
        directory = free_directory(self._root, model, path, row.id)
        captured = await self._trainer.capture_state(model.key, optimizer=True)
        self._persisting.add(path)
        return Saving(row, model, body, captured, directory)

    async def persist(self, saving: Saving) -> None:
        """Write, record and answer; a failure is the answer as well."""
        try:
            size = await self._trainer.persist_state(saving.captured, str(saving.directory))
            await self._record(saving, size)
        except Exception as error:  # becomes the result of this request
            await self._outbox.send([(saving.row.id, failure_of(error))])
        finally:
            self._persisting.discard(saving.path)

    async def _record(self, saving: Saving, size: int) -> None:
        """The row and the answer, in one commit."""

        def op(conn: Connection) -> None:
            checkpoint_records.add(conn, _checkpoint(saving, size), replace=saving.body.overwrite)

        answer = json_answer({"path": str(saving.path), "type": "save_weights"})
        try:
            await self._outbox.send([(saving.row.id, answer)], op)
        except Exception:  # nobody will ever find it
            await asyncio.to_thread(shutil.rmtree, saving.directory, ignore_errors=True)
            raise


def _path(model: ModelRow, body: SaveWeightsBody) -> TinkerPath:
    return TinkerPath(model.model_id, CheckpointKind.WEIGHTS, body.name)


def _checkpoint(saving: Saving, size: int) -> NewCheckpoint:
    model, path = saving.model, saving.path
    return NewCheckpoint(
        model_key=model.key,
        kind=path.kind,
        name=path.name,
        directory=str(saving.directory),
        base_model=model.base_model,
        spec=model.spec,
        size_bytes=size,
        has_optimizer=True,
        optimizer_config=model.optimizer_config,
        user_metadata=saving.body.user_metadata,
        expires_at=expiry(saving.body.ttl_seconds),
    )
