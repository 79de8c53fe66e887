"""save_weights: a model's training state, written while the model trains on."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.engine.saves.save_flow import Save, SaveFlow
from skyrl_tinker.protocol.stored_requests import SaveWeightsBody
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow


class Saver(SaveFlow[Save[SaveWeightsBody]]):
    """Saves of training state. From `capture` to the end of `persist` a model may train, not save or load.

    So its saves end in order, and one at a time is in host memory. It may be released meanwhile.
    """

    async def capture(self, row: QueuedRow, model: ModelRow, body: SaveWeightsBody) -> Save[SaveWeightsBody]:
        """Copy the state on the trainer; `persist` must follow. Raises SkyrlTinkerError."""
        path = TinkerPath(model.model_id, CheckpointKind.WEIGHTS, body.name)
        async with self._reserving(path, overwrite=body.overwrite):
            directory = self._new_directory(row, model, path)
            captured = await self._trainer.capture_state(model.key, optimizer=True)
        return Save(row, model, body, path, directory, captured)

    async def _write(self, save: Save[SaveWeightsBody]) -> int:
        size = await self._trainer.persist_state(save.captured, str(save.directory))
        await self._free(save)  # before storing, as storage may be away for long
        return size

    def _record(self, conn: Connection, save: Save[SaveWeightsBody], size: int) -> Mapping[str, Any]:
        checkpoint = save.checkpoint(
            conn,
            size,
            has_optimizer=True,
            optimizer_config=save.model.optimizer_config,
            user_metadata=save.body.user_metadata,
        )
        checkpoint_records.add(conn, checkpoint, replace=save.body.overwrite)
        return {"path": str(save.path)}
