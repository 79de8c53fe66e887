"""Lists of checkpoints, as REST shows them."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.domain.ids import CheckpointKind, ModelId, OwnerId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import model_records
from skyrl_tinker.store.checkpoint_records import WITH_MODEL, CheckpointRow, checkpoint_of, live
from skyrl_tinker.store.database.tables import Model, SavedCheckpoint, Session
from skyrl_tinker.store.owners import owned_by


@dataclass(frozen=True, slots=True)
class CheckpointPage:
    """`total`: over all pages."""

    checkpoints: list[CheckpointRow]
    total: int


async def of_run(
    conn: AsyncConnection, owner: OwnerId | None, model_id: ModelId, kinds: Collection[CheckpointKind]
) -> list[CheckpointRow]:
    """Oldest first; of another owner's run those that are published. NotFoundError if nothing can be seen."""
    readable = or_(owned_by(owner), SavedCheckpoint.public)
    wanted = Model.model_id == model_id, readable, SavedCheckpoint.kind.in_(kinds), *live()
    rows = [
        checkpoint_of(row)
        for row in await conn.execute(WITH_MODEL.where(*wanted).order_by(SavedCheckpoint.id))
    ]
    if not rows and await model_records.find(conn, owner, model_id) is None:
        raise NotFoundError(f"no training run {model_id}")
    return rows


async def page(
    conn: AsyncConnection, owner: OwnerId | None, kinds: Collection[CheckpointKind], limit: int, offset: int
) -> CheckpointPage:
    """This owner's, newest first."""
    wanted: tuple[ColumnElement[bool], ...] = (owned_by(owner), SavedCheckpoint.kind.in_(kinds), *live())
    count = (
        select(func.count())
        .select_from(SavedCheckpoint)
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .join(Session, Session.session_id == Model.session_id)
    )
    rows = WITH_MODEL.where(*wanted).order_by(SavedCheckpoint.id.desc()).limit(limit).offset(offset)
    found = [checkpoint_of(row) for row in await conn.execute(rows)]
    return CheckpointPage(found, await conn.scalar(count.where(*wanted)) or 0)
