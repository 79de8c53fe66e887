"""`import-adapter`: a foreign PEFT LoRA adapter becomes a checkpoint that training can start from."""

import asyncio
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker import base_model
from skyrl_tinker.config import Settings
from skyrl_tinker.errors import StartupError, StorageError
from skyrl_tinker.places import Places
from skyrl_tinker.store import checkpoints, models, sessions, sqlite, state
from skyrl_tinker.store.checkpoints import NewCheckpoint
from skyrl_tinker.store.migrate import migrate
from skyrl_tinker.store.models import NewModel
from skyrl_tinker.store.store import Store
from skyrl_tinker.wire.ids import CheckpointKind, ModelState
from skyrl_tinker.wire.paths import TinkerPath, validate_checkpoint_name
from skyrl_tinker.wire.values import LoraSpec

_OPTIMIZER: Mapping[str, Any] = {"type": "adamw"}
_WHY_RELEASED = "imported: it has a checkpoint to create models from, and is not trained itself"


@dataclass(frozen=True, slots=True)
class Base:
    """The base model of a server. `name`: one that it knows it by."""

    directory: str
    name: str


@dataclass(frozen=True, slots=True)
class _Import:
    """What is about to be recorded. `directory` is complete on disk."""

    source: Path
    name: str
    directory: Path
    base: Base
    spec: LoraSpec
    size_bytes: int


def import_adapter(
    source: Path, settings: Settings, *, name: str | None = None, served: str | None = None
) -> TinkerPath:
    """Also while a server of this home runs.

    `name`: of the checkpoint, by default the directory's. `served`: the base model, by default the one that
    this home's server had last. Raises UserError when the adapter is none of ours to convert, StartupError
    when the base model is unknown, StorageError when the checkpoint cannot be written.
    """
    chosen = validate_checkpoint_name(name or source.absolute().name)
    base = _base(settings, served)
    directory = settings.checkpoint_root / f"import-{secrets.token_hex(8)}" / CheckpointKind.WEIGHTS / chosen
    try:
        spec, size = _write(source, base, directory)
        return asyncio.run(_record(settings, _Import(source, chosen, directory, base, spec, size)))
    except BaseException:  # whatever it was: what nobody can find must not stay
        shutil.rmtree(directory.parent.parent, ignore_errors=True)
        raise


def _base(settings: Settings, served: str | None) -> Base:
    if served is None and not Path(sqlite.database(settings.store_url)).exists():
        raise StartupError(
            f"nothing was served from {settings.root} yet: name the base model with --base-model"
        )
    Places(settings).make()
    migrate(settings.store_url)
    if served is None:
        return asyncio.run(_last_served(settings))
    facts = base_model.resolve(settings.model_copy(update={"base_model": served}))
    return Base(facts.directory, facts.directory)  # a server knows it by its directory, whatever else


async def _last_served(settings: Settings) -> Base:
    store = await Store.open(settings.store_url)
    try:
        async with store.read() as conn:
            facts: Any = await state.get(conn, "base_model")
    finally:
        await store.close()
    if facts is None:
        raise StartupError(f"{settings.root} has served no model yet: name the base model with --base-model")
    return Base(facts["directory"], facts["names"][0])


def _write(source: Path, base: Base, directory: Path) -> tuple[LoraSpec, int]:
    """The checkpoint's directory; returns what it holds and its size in bytes."""
    from skyrl_tinker.training import checkpoint, foreign  # torch and transformers: seconds

    model = foreign.convert(foreign.read_foreign(source), base.directory)
    captured = checkpoint.capture(model, base.directory, optimizer=False, rank=0, world=1)
    scratch = directory.with_name(f".{directory.name}.tmp")
    try:
        files = checkpoint.persist(captured, scratch)
        size = checkpoint.commit(captured.contents, files, scratch, directory)
    except OSError as error:
        raise StorageError(f"{directory} could not be written: {error.strerror or error}") from error
    return model.spec, size


async def _record(settings: Settings, done: _Import) -> TinkerPath:
    store = await Store.open(settings.store_url)
    try:
        return await store.write(lambda conn: _rows(conn, done))
    finally:
        await store.close()


async def _rows(conn: AsyncConnection, done: _Import) -> TinkerPath:
    """A path names a training run: one that is over before it began, in a session of its own."""
    session = await sessions.create(
        conn,
        tags=["import-adapter"],
        user_metadata={},
        project_id=None,
        display_name=None,
        sdk_version="import-adapter",
    )
    metadata = {"imported_from": str(done.source.absolute())}
    run = NewModel(session, 0, done.base.name, done.spec, _OPTIMIZER, metadata)
    key = await models.add(conn, run, ModelState.RELEASED, _WHY_RELEASED)
    await sessions.finish(conn, session, "imported", None)
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
    await checkpoints.add(conn, new, replace=False)
    return TinkerPath(run.model_id, kind, done.name)
