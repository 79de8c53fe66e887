"""save_weights_external: weights in the layout of PEFT (LoRA) or Hugging Face (full parameters).

A full export also has the base model's small files, such as its tokenizer. Either may be encrypted.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.saves.export_files import Export, finish_export
from skyrl_tinker.engine.saves.pending_writes import PendingWrites
from skyrl_tinker.engine.saves.save_flow import Save, SaveFlow
from skyrl_tinker.engine.unit_commits import UnitCommits
from skyrl_tinker.protocol.stored_requests import SaveExternalBody
from skyrl_tinker.storage.checkpoint_storage import LOCAL_DISK, Storage
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.atomic_directory import storage_errors
from skyrl_tinker.system.off_loop import in_disk_thread, in_transfer_thread
from skyrl_tinker.training.trainer_group import TrainerGroup

SHARD_BYTES = 5 * 10**9
"""Approximate size of a file of a full-parameter model, as on the Hugging Face hub."""


class Exporter(SaveFlow[Save[SaveExternalBody]]):
    """Exports of models. From `capture` to the end of `persist` a model may train, but not save or load."""

    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        commits: UnitCommits,
        pending: PendingWrites,
        facts: BaseModelFacts,
        checkpoint_root: Path,
        storage: Storage = LOCAL_DISK,
    ) -> None:
        super().__init__(store, trainer, commits, pending, checkpoint_root, storage)
        self._facts = facts

    async def capture(
        self, row: QueuedRow, model: ModelRow, body: SaveExternalBody
    ) -> Save[SaveExternalBody]:
        """Copy the weights on the trainer; `persist` must follow. Raises SkyrlTinkerError."""
        path = TinkerPath(model.model_id, CheckpointKind.EXTERNAL_WEIGHTS, body.name)
        async with self._reserving(path):
            directory = self._new_directory(row, model, path)
            captured = await self._trainer.capture_export(model.key, SHARD_BYTES)
        return Save(row, model, body, path, directory, captured)

    async def _write(self, save: Save[SaveExternalBody]) -> int:
        await in_disk_thread(shutil.rmtree, save.staging, ignore_errors=True)
        await self._trainer.persist_state(save.captured, str(save.staging))
        export = Export(self._facts, save.model.spec, self._trainer.spec.dtype, save.body.recipients)
        with storage_errors("the export could not be written"):
            size = await in_transfer_thread(finish_export, export, save.staging, save.directory)
        await self._free(save)  # before storing, as storage may be away for long
        return size

    def _record(self, conn: Connection, save: Save[SaveExternalBody], size: int) -> Mapping[str, Any]:
        checkpoint_records.add(conn, save.checkpoint(conn, size), replace=False)
        return {"path": str(save.path), "size_bytes": size}
