"""`import-adapter`: a foreign PEFT LoRA adapter becomes a checkpoint that training can start from."""

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import CheckpointKind, ModelState, OwnerId
from skyrl_tinker.domain.tinker_path import TinkerPath, validate_checkpoint_name
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StartupError, StorageError, UserError
from skyrl_tinker.server import base_model
from skyrl_tinker.store import api_keys, checkpoint_records, model_records, server_state, session_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.model_records import NewModel
from skyrl_tinker.store.store import write_once

_OPTIMIZER: Mapping[str, Any] = {"type": "adamw"}
_WHY_RELEASED = "imported: it has a checkpoint to create models from, and is not trained itself"


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base model of a server. `name`: one that it knows it by."""

    directory: str
    name: str


@dataclass(frozen=True, slots=True)
class _Import:
    """What is about to be recorded. `directory` is complete on disk."""

    source: Path
    name: str
    directory: Path
    base: ServedBase
    spec: LoraSpec
    size_bytes: int
    owner: OwnerId | None


def import_adapter(
    source: Path,
    settings: Settings,
    *,
    name: str | None = None,
    served: str | None = None,
    key: str | None = None,
) -> TinkerPath:
    """Also while a server of this home runs.

    `name`: of the checkpoint, by default the directory's. `served`: the base model, by default the one that
    this home's server had last. `key`: the name of the API key that finds it, which a home with keys needs.

    Raises UserError when the adapter is none of ours to convert, StartupError
    when the base model is unknown, NotFoundError when the key is, StorageError when the checkpoint cannot be
    written.
    """
    chosen = validate_checkpoint_name(name or source.absolute().name)
    base = _base(settings, served)
    owner = _owner(settings, key)
    directory = settings.checkpoint_root / f"import-{secrets.token_hex(8)}" / CheckpointKind.WEIGHTS / chosen
    try:
        spec, size = _write(source, base, directory)
        done = _Import(source, chosen, directory, base, spec, size, owner)
        return write_once(settings.store_url, lambda conn: _rows(conn, done))
    except BaseException:  # whatever it was: what nobody can find must not stay
        shutil.rmtree(directory.parent.parent, ignore_errors=True)
        raise


def _base(settings: Settings, served: str | None) -> ServedBase:
    if served is None and not Path(sqlite.database(settings.store_url)).exists():
        raise StartupError(
            f"nothing was served from {settings.root} yet: name the base model with --base-model"
        )
    Directories(settings).make()
    migrate(settings.store_url)
    if served is None:
        return _last_served(settings)
    facts = base_model.resolve(settings.model_copy(update={"base_model": served}))
    return ServedBase(facts.directory, facts.directory)  # a server knows it by its directory, whatever else


def _owner(settings: Settings, key: str | None) -> OwnerId | None:
    """Of a migrated home."""

    def find(conn: Connection) -> OwnerId | None:
        if key is not None:
            return api_keys.live_id(conn, key)
        if api_keys.count_keys(conn)[0]:
            raise UserError(
                "--key is missing: this home has API keys, and only the key that is named finds it"
            )
        return None

    return write_once(settings.store_url, find)


def _last_served(settings: Settings) -> ServedBase:
    facts = write_once(settings.store_url, lambda conn: server_state.get(conn, "base_model"))
    if facts is None:
        raise StartupError(f"{settings.root} has served no model yet: name the base model with --base-model")
    return ServedBase(facts["directory"], facts["names"][0])


def _write(source: Path, base: ServedBase, directory: Path) -> tuple[LoraSpec, int]:
    """The checkpoint's directory; returns what it holds and its size in bytes."""
    from skyrl_tinker.training.checkpoints import (  # torch and transformers: seconds
        checkpoint_save,
        peft_import,
    )

    model = peft_import.convert(peft_import.read_foreign(source), base.directory)
    captured = checkpoint_save.capture(model, base.directory, optimizer=False, rank=0, world=1)
    scratch = directory.with_name(f".{directory.name}.tmp")
    try:
        files = checkpoint_save.persist(captured, scratch)
        size = checkpoint_save.commit(captured.contents, files, scratch, directory)
    except OSError as error:
        raise StorageError(f"{directory} could not be written: {error.strerror or error}") from error
    return model.spec, size


def _rows(conn: Connection, done: _Import) -> TinkerPath:
    """A path names a training run: one that is over before it began, in a session of its own."""
    session = session_records.create(
        conn,
        owner=done.owner,
        tags=["import-adapter"],
        user_metadata={},
        project_id=None,
        display_name=None,
        sdk_version="import-adapter",
    )
    metadata = {"imported_from": str(done.source.absolute())}
    run = NewModel(session, 0, done.base.name, done.spec, _OPTIMIZER, metadata)
    key = model_records.add(conn, run, ModelState.RELEASED, _WHY_RELEASED)
    session_records.finish(conn, session, "imported", None)
    kind = CheckpointKind.WEIGHTS
    new = NewCheckpoint(
        model_key=key,
        kind=kind,
        name=done.name,
        directory=str(done.directory),
        base_model=done.base.name,
        spec=done.spec,
        size_bytes=done.size_bytes,
        optimizer_config=_OPTIMIZER,
        user_metadata=metadata,
    )
    checkpoint_records.add(conn, new, replace=False)
    return TinkerPath(run.model_id, kind, done.name)
