"""save_weights_external: weights in the layout of PEFT (LoRA) or Hugging Face (full parameters).

A full export also has the base model's small files, such as its tokenizer. Either may be encrypted.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.manifest import FILE_NAME, Manifest, entry_of, read_manifest, write_manifest
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, MERGING_FILE, MERGING_NOTE, merges_wrongly
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.engine.saves.save_flow import Save, SaveFlow
from skyrl_tinker.protocol import age_encryption
from skyrl_tinker.protocol.stored_requests import SaveExternalBody
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.system.atomic_directory import publish, storage_errors
from skyrl_tinker.system.off_loop import in_disk_thread, in_load_thread
from skyrl_tinker.system.turns import Turns

SHARD_BYTES = 5 * 10**9
"""Approximate size of a file of a full-parameter model, as on the Hugging Face hub."""
CONFIG_FILE = "config.json"
_SMALL = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_NOTICES = ("LICENSE", "NOTICE")


@dataclass(frozen=True, slots=True)
class Export:
    """Base model and spec of exported weights, `dtype` of full ones, and the recipients of encryption."""

    facts: BaseModelFacts
    spec: LoraSpec
    dtype: str
    recipients: Sequence[str] = ()


@dataclass(eq=False)
class Exporter(SaveFlow[Save[SaveExternalBody]]):
    """Exports of models. From `capture` to the end of `persist` a model may train, but not save or load."""

    _facts: BaseModelFacts

    def __post_init__(self) -> None:
        super().__post_init__()
        self._complete: dict[int, Manifest] = {}  # plain files that need the ranks no more, by future id
        self._turns = Turns()  # of each owner: exports and loads share a few threads

    async def capture(
        self, row: QueuedRow, model: ModelRow, body: SaveExternalBody
    ) -> Save[SaveExternalBody]:
        """Copy the weights on the trainer; `persist` must follow. Raises SkyrlTinkerError."""
        path = TinkerPath(model.model_id, CheckpointKind.EXTERNAL_WEIGHTS, body.name)
        async with self._reserving(path):
            directory = self._new_directory(row, model, path)
            captured = await self._trainer.capture_export(model.key, SHARD_BYTES)
        return Save(row, model, body, path, directory, captured)

    async def persist(self, save: Save[SaveExternalBody]) -> bool:
        try:
            return await super().persist(save)
        finally:
            self._complete.pop(save.row.id, None)

    async def _write(self, save: Save[SaveExternalBody]) -> int:
        export = Export(self._facts, save.model.spec, self._trainer.spec.dtype, save.body.recipients)
        with storage_errors("the export could not be written"):
            if save.row.id not in self._complete:
                await self._write_plain(save, export)
            written = self._complete[save.row.id]
            finish = partial(in_load_thread, finish_export, export, written, save.staging, save.directory)
            return await self._turns.run(save.row.owner_id, finish)

    async def _write_plain(self, save: Save[SaveExternalBody], export: Export) -> None:
        """Write all that needs the ranks: no recovery waits for encryption, or for its turn."""
        await in_disk_thread(shutil.rmtree, save.staging, ignore_errors=True)
        await self._trainer.persist_state(save.captured, str(save.staging))
        self._complete[save.row.id] = await in_disk_thread(complete_export, export, save.staging)
        await self._free(save)
        self._pending.note_here(save.row.id)

    def _record(self, conn: Connection, save: Save[SaveExternalBody], size: int) -> Mapping[str, Any]:
        checkpoint_records.add(conn, save.checkpoint(conn, size), replace=False)
        return {"path": str(save.path), "size_bytes": size}


def complete_export(export: Export, staging: Path) -> Manifest:
    """Add the other files of an export to the trainer's checkpoint in `staging`; returns that one's manifest.

    Raises OSError.
    """
    if export.spec.rank:
        # PEFT finds the base model by this name; a directory of this server exists nowhere else
        _update_json(staging / ADAPTER_CONFIG_FILE, "base_model_name_or_path", export.facts.names[0])
        if merges_wrongly(export.spec, export.facts):
            (staging / MERGING_FILE).write_text(MERGING_NOTE)
    else:
        _add_base_files(Path(export.facts.directory), staging, export.dtype)
    return read_manifest(staging)


def finish_export(export: Export, written: Manifest, staging: Path, directory: Path) -> int:
    """Encrypt a complete export if it has recipients, and publish `staging` as `directory`.

    Its manifest names the files to download. Returns their bytes. Raises OSError: then repeat it, unless the
    directory exists. `written`: the manifest of the trainer's checkpoint.
    """
    if export.recipients:
        for file in _files(staging):
            if file.suffix != age_encryption.SUFFIX:  # of an earlier try
                age_encryption.encrypt(file, export.recipients)
    size = _write_manifest(export, staging, written)
    publish(staging, directory)
    return size


def _files(directory: Path) -> list[Path]:
    others = (FILE_NAME, age_encryption.PARTIAL)
    return sorted(file for file in directory.iterdir() if file.name not in others)


def _add_base_files(base: Path, staging: Path, dtype: str) -> None:
    """Copy the base model's small files; config.json gets the dtype of the exported weights."""
    for file in base.iterdir():
        if file.is_file() and _is_exported(file.name):
            shutil.copyfile(file, staging / file.name)
    config = staging / CONFIG_FILE
    _update_json(config, "torch_dtype" if "torch_dtype" in json.loads(config.read_text()) else "dtype", dtype)


def _is_exported(name: str) -> bool:
    if name == FILE_NAME or name.endswith(".index.json"):  # they describe the base model's own files
        return False
    return Path(name).suffix in _SMALL or name.startswith(_NOTICES)


def _write_manifest(export: Export, staging: Path, written: Manifest) -> int:
    """Write the manifest of the finished files; returns their bytes."""
    changed = {ADAPTER_CONFIG_FILE, CONFIG_FILE}
    known = {name: entry for name, entry in written.files.items() if name not in changed}
    entries = {file.name: known.get(file.name) or entry_of(file) for file in _files(staging)}
    name = export.facts.names[0]
    write_manifest(staging, Manifest(name, export.spec, written.step, None, entries))
    return sum(entry.size for entry in entries.values())


def _update_json(file: Path, key: str, value: Any) -> None:
    content: Mapping[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps({**content, key: value}, indent=2) + "\n")
