"""save_weights: a model's training state, written while the model trains on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.engine.saves.pending_writes import PendingWrites
from skyrl_tinker.engine.saves.save_flow import Save, SaveFlow
from skyrl_tinker.engine.unit_commits import UnitCommits
from skyrl_tinker.protocol.stored_requests import SaveWeightsBody
from skyrl_tinker.storage.checkpoint_storage import LOCAL_DISK, Storage
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import CapturedState, TrainerGroup


@dataclass(frozen=True, slots=True)
class TrainingSave(Save):
    body: SaveWeightsBody
    captured: CapturedState


class Saver(SaveFlow[TrainingSave]):
    """Saves of training state. From `capture` to the end of `persist` a model may train, not save or load.

    So its saves end in order, and one at a time is in host memory. It may be released meanwhile.
    """

    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        commits: UnitCommits,
        pending: PendingWrites,
        checkpoint_root: Path,
        storage: Storage = LOCAL_DISK,
    ) -> None:
        super().__init__(store, commits, pending, checkpoint_root, storage)
        self._trainer = trainer

    async def capture(self, row: QueuedRow, model: ModelRow, body: SaveWeightsBody) -> TrainingSave:
        """Copy the state on the trainer; `persist` must follow. Raises SkyrlTinkerError."""
        path = TinkerPath(model.model_id, CheckpointKind.WEIGHTS, body.name)
        async with self._reserving(path, overwrite=body.overwrite):
            directory = self._new_directory(row, model, path)
            captured = await self._trainer.capture_state(model.key, optimizer=True)
        return TrainingSave(row, model, body, path, directory, captured)

    async def _write(self, save: TrainingSave) -> int:
        size = await self._trainer.persist_state(save.captured, str(save.directory))
        await self._free(save)  # before storing, as storage may be away for long
        return size

    async def _free(self, save: TrainingSave) -> None:
        await save.captured.drop()

    def _record(self, conn: Connection, save: TrainingSave, size: int) -> Mapping[str, Any]:
        checkpoint = replace(
            save.checkpoint(conn, size),
            has_optimizer=True,
            optimizer_config=save.model.optimizer_config,
            user_metadata=save.body.user_metadata,
        )
        checkpoint_records.add(conn, checkpoint, replace=save.body.overwrite)
        return {"path": str(save.path)}
