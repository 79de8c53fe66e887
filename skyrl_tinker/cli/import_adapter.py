"""`import-adapter`: a foreign PEFT LoRA adapter becomes a checkpoint that training can start from."""

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import CheckpointKind, ModelState, OwnerId
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from skyrl_tinker.domain.tinker_path import TinkerPath, validate_checkpoint_name
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StartupError, UserError
from skyrl_tinker.server.base_models import base_model, hub
from skyrl_tinker.storage.checkpoint_storage import open_storage
from skyrl_tinker.store import api_keys, checkpoint_records, model_records, server_state, session_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.store.model_records import DEFAULT_OPTIMIZER, NewModel
from skyrl_tinker.store.store import write_once
from skyrl_tinker.system.atomic_directory import staging_of, storage_errors

_NONE_SERVED = "no server has run in {} yet: name the base model with --base-model"
_WHY_RELEASED = "imported: it has a checkpoint to create models from, and is not trained itself"


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base model of a server. `name`: one of its names there."""

    directory: str
    name: str


@dataclass(frozen=True, slots=True)
class _Import:
    """An adapter that is converted but not yet recorded. `directory` is complete on disk."""

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
    """Convert an adapter and record it as a checkpoint; a server of this home may be running.

    `name`: of the checkpoint, by default the directory's. `served`: the base model, by default the last one
    served from this home. `key`: the name of the API key that owns it, required in a home with keys.

    Raises UserError when the adapter cannot be converted, StartupError when the base model is unknown,
    NotFoundError when the key is, StorageError when the checkpoint cannot be written.
    """
    try:
        checkpoint = validate_checkpoint_name(name or source.absolute().name)
    except UserError as error:
        raise error if name else UserError(f"{error} (of the directory; --name gives another)") from None
    _require_files(source)
    base = _base(settings, served)
    owner = _owner(settings, key)
    directory = (
        settings.checkpoint_root / f"import-{secrets.token_hex(8)}" / CheckpointKind.WEIGHTS / checkpoint
    )
    storage = open_storage(settings.checkpoint_root, settings.checkpoint_url)
    try:
        spec, size = _write(source, base, directory)
        storage.store(directory)
        adapter = _Import(source, checkpoint, directory, base, spec, size, owner)
        return write_once(settings.store_url, lambda conn: _record(conn, adapter), settings.root)
    except BaseException:  # failed, or Ctrl-C: without a record nothing would delete the files
        storage.discard(directory)
        shutil.rmtree(directory.parent.parent, ignore_errors=True)
        raise


def _require_files(source: Path) -> None:
    """Refuse a directory that is no adapter, before torch is imported."""
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
        if not (source / name).is_file():
            raise UserError(
                f"{source}: found no {name}, expected the directory of a PEFT adapter, which has one"
            )


def _base(settings: Settings, served: str | None) -> ServedBase:
    database = file_of(settings.store_url)
    if served is None and database is not None and not database.exists():
        raise StartupError(_NONE_SERVED.format(settings.root))
    Directories(settings).make()
    migrate(settings.store_url, settings.root)
    bases = write_once(settings.store_url, server_state.get_bases)
    if served is None:
        if bases is None:
            raise StartupError(_NONE_SERVED.format(settings.root))
        return ServedBase(bases.first.directory, bases.first.name)
    known = bases and bases.find(served)
    facts = known or base_model.resolve(settings.model_copy(update={"base_model": served}))
    if facts.hub_name is not None:
        hub.fetch_weights(facts.hub_name, Path(facts.directory))
    return ServedBase(facts.directory, facts.directory)  # a server always serves it under its directory too


def _owner(settings: Settings, key: str | None) -> OwnerId | None:
    """Return the owner of the import. The home's database must be migrated."""

    def find(conn: Connection) -> OwnerId | None:
        if key is not None:
            return api_keys.find_live(conn, key).id
        if api_keys.count_keys(conn):
            raise UserError(
                "--key is missing: this home has API keys, and only the named key will see the checkpoint"
            )
        return None

    return write_once(settings.store_url, find)


def _write(source: Path, base: ServedBase, directory: Path) -> tuple[LoraSpec, int]:
    """Write the checkpoint's directory; return the adapter's shape and the size in bytes."""
    from skyrl_tinker.training.checkpoints import (  # torch and transformers: seconds
        checkpoint_save,
        peft_import,
    )

    model = peft_import.convert(peft_import.read_foreign(source), base.directory)
    captured = checkpoint_save.capture(model, base.directory, optimizer=False, rank=0, world=1)
    staging = staging_of(directory)
    with storage_errors(f"{directory} could not be written"):
        files = checkpoint_save.persist(captured, staging)
        size = checkpoint_save.commit(captured.contents, files, staging, directory)
    return model.spec, size


def _record(conn: Connection, adapter: _Import) -> TinkerPath:
    """Insert the checkpoint, and the training run of its path: released, in a session of its own."""
    session = session_records.create(
        conn, owner=adapter.owner, tags=["import-adapter"], sdk_version="import-adapter"
    )
    metadata = {"imported_from": adapter.source.absolute().name}
    run = NewModel(session, 0, adapter.base.name, adapter.spec, DEFAULT_OPTIMIZER, metadata)
    key = model_records.add(conn, run, ModelState.RELEASED, _WHY_RELEASED)
    session_records.finish(conn, session, "imported", None)
    kind = CheckpointKind.WEIGHTS
    new = NewCheckpoint(
        model_key=key,
        kind=kind,
        name=adapter.name,
        directory=str(adapter.directory),
        base_model=adapter.base.name,
        spec=adapter.spec,
        size_bytes=adapter.size_bytes,
        optimizer_config=DEFAULT_OPTIMIZER,
        user_metadata=metadata,
    )
    checkpoint_records.add(conn, new, replace=False)
    return TinkerPath(run.model_id, kind, adapter.name)
