"""Storage of checkpoints, present and past: rows outlive their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, func, or_, select

from skyrl_tinker.domain.ids import Reach
from skyrl_tinker.store.checkpoint_records import is_live
from skyrl_tinker.store.database.rows import AnyRow, as_row, total
from skyrl_tinker.store.database.tables import ApiKey, Model, SavedCheckpoint, Session
from skyrl_tinker.store.owners import OWNER_NAME, in_project, within


@dataclass(frozen=True, slots=True)
class StoredPeriod:
    """One checkpoint, stored from `created_at` to `ended_at` (None: still stored), UTC seconds."""

    session_id: str
    project_id: str | None
    base_model: str
    size_bytes: int
    created_at: float
    ended_at: float | None


def periods_between(conn: Connection, reach: Reach, start: float, end: float) -> list[StoredPeriod]:
    """Return the checkpoints that the caller sees and that were stored at some time in [start, end)."""
    query = _within(
        reach,
        Session.session_id,
        Session.project_id,
        SavedCheckpoint.base_model,
        SavedCheckpoint.size_bytes,
        SavedCheckpoint.created_at,
        SavedCheckpoint.deleted_at,
        SavedCheckpoint.expires_at,
    ).where(SavedCheckpoint.created_at < end, *(or_(ends.is_(None), ends > start) for ends in _ENDS))
    return [_stored(row) for row in conn.execute(query)]


def current_totals(conn: Connection, reach: Reach, project_id: str | None) -> Sequence[AnyRow]:
    """Return sums of visible checkpoints by owner and project; `project_id` None: of all projects.

    Rows have `owner`, a name, `project_id`, `checkpoint_count` and `size_bytes`.
    """
    sums = func.count().label("checkpoint_count"), total(SavedCheckpoint.size_bytes).label("size_bytes")
    query = _within(reach, OWNER_NAME.label("owner"), Session.project_id, *sums).where(*is_live(conn))
    query = query.group_by(Session.owner_id, OWNER_NAME, Session.project_id)
    if project_id is not None:
        query = query.where(in_project([project_id]))
    return conn.execute(query).all()


def _stored(row: AnyRow) -> StoredPeriod:
    ends = [end for end in (row.deleted_at, row.expires_at) if end is not None]
    return as_row(StoredPeriod, row, ended_at=min(ends, default=None))


_ENDS = (SavedCheckpoint.deleted_at, SavedCheckpoint.expires_at)


def _within(reach: Reach, *columns: Any) -> Select[Any]:
    return (
        select(*columns)
        .select_from(SavedCheckpoint)
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .join(Session, Session.session_id == Model.session_id)
        .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
        .where(within(reach))
    )
