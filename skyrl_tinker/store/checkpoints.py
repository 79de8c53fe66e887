"""Named checkpoints. Each has a directory of its own, never used again; what is replaced becomes garbage."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, insert, or_, select, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store.models import spec_columns, spec_of
from skyrl_tinker.store.rows import AnyRow, insert_id
from skyrl_tinker.store.sampling import held
from skyrl_tinker.store.tables import Checkpoint, Model
from skyrl_tinker.wire.ids import CheckpointKind, ModelId, ModelKey, VersionId
from skyrl_tinker.wire.values import LoraSpec


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """`directory` is complete on disk. `version_id`: the sampler weights that lie in it."""

    model_key: ModelKey
    kind: CheckpointKind
    name: str
    directory: str
    base_model: str
    spec: LoraSpec
    size_bytes: int
    has_optimizer: bool = False
    optimizer_config: Mapping[str, Any] | None = None
    user_metadata: Mapping[str, Any] | None = None
    version_id: VersionId | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    id: int
    model_key: ModelKey
    model_id: ModelId
    kind: CheckpointKind
    name: str
    directory: str
    version_id: VersionId | None
    base_model: str
    spec: LoraSpec
    has_optimizer: bool
    optimizer_config: Mapping[str, Any]
    size_bytes: int
    user_metadata: Mapping[str, Any]
    created_at: float
    expires_at: float | None


async def add(conn: AsyncConnection, new: NewCheckpoint, *, replace: bool) -> int:
    """Record a checkpoint; one of the same name is replaced (its directory becomes garbage).

    Raises UserError if there is one and `replace` is false.
    """
    now = time.time()
    same = (
        Checkpoint.model_key == new.model_key,
        Checkpoint.kind == new.kind,
        Checkpoint.name == new.name,
        Checkpoint.deleted_at.is_(None),
    )
    if not replace and await conn.scalar(select(Checkpoint.id).where(*same, _not_expired(now))):
        raise UserError(
            f"checkpoint {new.kind}/{new.name} of this model exists and overwrite is false: "
            "choose another name or delete it first"
        )
    await conn.execute(update(Checkpoint).where(*same).values(deleted_at=now))
    return await insert_id(conn, insert(Checkpoint), {"created_at": now, **_columns(new)})


async def find(
    conn: AsyncConnection, model_id: ModelId, kind: CheckpointKind, name: str
) -> CheckpointRow | None:
    """None if there is none of that name, or it is deleted or expired."""
    where = (Model.model_id == model_id, Checkpoint.kind == kind, Checkpoint.name == name)
    rows = await _all(conn, *where, *_live())
    return rows[0] if rows else None


async def of_model(conn: AsyncConnection, model_key: ModelKey) -> list[CheckpointRow]:
    """The live ones, oldest first."""
    return await _all(conn, Checkpoint.model_key == model_key, *_live())


async def last_of_model(
    conn: AsyncConnection, model_key: ModelKey, kind: CheckpointKind
) -> CheckpointRow | None:
    rows = await _all(conn, Checkpoint.model_key == model_key, Checkpoint.kind == kind, *_live())
    return rows[-1] if rows else None


async def delete(conn: AsyncConnection, model_id: ModelId, kind: CheckpointKind, name: str) -> None:
    """From now on nobody finds it. Raises NotFoundError if nobody does already."""
    row = await find(conn, model_id, kind, name)
    if row is None:
        raise NotFoundError(f"no checkpoint tinker://{model_id}/{kind}/{name}")
    await conn.execute(update(Checkpoint).where(Checkpoint.id == row.id).values(deleted_at=time.time()))


async def garbage(conn: AsyncConnection, now: float) -> list[CheckpointRow]:
    """Deleted or expired, and held by no live sampling session: remove the directory, then `forget`."""
    over = or_(Checkpoint.deleted_at.is_not(None), Checkpoint.expires_at <= now)
    return await _all(conn, over, ~held(Checkpoint.version_id))


async def forget(conn: AsyncConnection, checkpoint_id: int) -> None:
    await conn.execute(sql_delete(Checkpoint).where(Checkpoint.id == checkpoint_id))


def _live() -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Checkpoint.deleted_at.is_(None), _not_expired(time.time())


def _not_expired(now: float) -> ColumnElement[bool]:
    return or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now)


def _columns(new: NewCheckpoint) -> dict[str, Any]:
    return {
        "model_key": new.model_key,
        "kind": new.kind,
        "name": new.name,
        "directory": new.directory,
        "version_id": new.version_id,
        "base_model": new.base_model,
        "has_optimizer": new.has_optimizer,
        "optimizer_config": dict(new.optimizer_config or {}),
        "size_bytes": new.size_bytes,
        "user_metadata": dict(new.user_metadata or {}),
        "expires_at": new.expires_at,
        **spec_columns(new.spec),
    }


async def _all(conn: AsyncConnection, *where: ColumnElement[bool]) -> list[CheckpointRow]:
    query = (
        select(Checkpoint.__table__, Model.model_id)
        .join(Model, Model.key == Checkpoint.model_key)
        .where(*where)
        .order_by(Checkpoint.id)
    )
    return [_checkpoint(row) for row in await conn.execute(query)]


def _checkpoint(row: AnyRow) -> CheckpointRow:
    return CheckpointRow(
        id=row.id,
        model_key=ModelKey(row.model_key),
        model_id=ModelId(row.model_id),
        kind=row.kind,
        name=row.name,
        directory=row.directory,
        version_id=row.version_id,
        base_model=row.base_model,
        spec=spec_of(row),
        has_optimizer=row.has_optimizer,
        optimizer_config=row.optimizer_config,
        size_bytes=row.size_bytes,
        user_metadata=row.user_metadata,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )
