"""save_weights_external: weights as others load them, captured on the trainer, which then goes on.

LoRA: a PEFT adapter. Full parameters: a Hugging Face model, with the tokenizer and all else that is small of
the base model. Either may be encrypted for those who are to read it.
"""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.outbox import Outbox, failure_of, json_answer
from skyrl_tinker.engine.saves.checkpoint_names import free_directory, require_free
from skyrl_tinker.engine.saves.export_files import Export, finish_export
from skyrl_tinker.errors import StorageError
from skyrl_tinker.protocol.stored_requests import SaveExternalBody
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint, expiry
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import CapturedState, TrainerGroup

SHARD_BYTES = 5 * 10**9
"""About the size of a file of a full-parameter model, as the hub has them."""


@dataclass(frozen=True, slots=True)
class Exporting:
    """A model's weights as they were when the save had its turn, on their way to `directory`."""

    row: QueuedRow
    model: ModelRow
    body: SaveExternalBody
    captured: CapturedState
    directory: Path

    @property
    def path(self) -> TinkerPath:
        return _path(self.model, self.body)

    @property
    def staging(self) -> Path:
        """Where it is put together; swept if the engine dies."""
        return self.directory.with_name(f".{self.directory.name}.partial")


class Exporter:
    """Between `capture` and the end of `persist` the model may train, but neither save nor load."""

    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        outbox: Outbox,
        facts: BaseModelFacts,
        checkpoint_root: Path,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._outbox = outbox
        self._facts = facts
        self._root = checkpoint_root
        self._shard_bytes = shard_bytes

    async def capture(self, row: QueuedRow, model: ModelRow, body: SaveExternalBody) -> Exporting:
        """The trainer's part. Raises SkyrlTinkerError. `persist` must follow."""
        path = _path(model, body)
        await require_free(self._store, path)
        directory = free_directory(self._root, model, path, row.id)
        captured = await self._trainer.capture_export(model.key, self._shard_bytes)
        return Exporting(row, model, body, captured, directory)

    async def persist(self, exporting: Exporting) -> None:
        """Write, record and answer; a failure is the answer as well."""
        try:
            await self._trainer.persist_state(exporting.captured, str(exporting.staging))
            size = await asyncio.to_thread(self._finish, exporting)
            await self._record(exporting, size)
        except Exception as error:  # becomes the result of this request
            await asyncio.to_thread(_remove, exporting)
            await self._outbox.send([(exporting.row.id, failure_of(error))])

    def _finish(self, exporting: Exporting) -> int:
        export = Export(
            self._facts, exporting.model.spec, self._trainer.spec.dtype, exporting.body.recipients
        )
        with _storing():
            return finish_export(export, exporting.staging, exporting.directory)

    async def _record(self, exporting: Exporting, size: int) -> None:
        """The row and the answer, in one commit."""

        def op(conn: Connection) -> None:
            checkpoint_records.add(conn, _checkpoint(exporting, size), replace=False)

        path = str(exporting.path)
        answer = json_answer({"path": path, "size_bytes": size, "type": "save_weights_external"})
        await self._outbox.send([(exporting.row.id, answer)], op)


def _path(model: ModelRow, body: SaveExternalBody) -> TinkerPath:
    return TinkerPath(model.model_id, CheckpointKind.EXTERNAL_WEIGHTS, body.name)


def _remove(exporting: Exporting) -> None:
    """Nobody will ever find it."""
    for directory in (exporting.staging, exporting.directory):
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the export could not be written: {error.strerror or error}") from error


def _checkpoint(exporting: Exporting, size: int) -> NewCheckpoint:
    model, path = exporting.model, exporting.path
    return NewCheckpoint(
        model_key=model.key,
        kind=path.kind,
        name=path.name,
        directory=str(exporting.directory),
        base_model=model.base_model,
        spec=model.spec,
        size_bytes=size,
        expires_at=expiry(exporting.body.ttl_seconds),
    )
