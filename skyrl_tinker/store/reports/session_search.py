"""Searching sessions: newest first, page by page from where the last page ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, String, and_, case, cast, false, func, or_, select, true, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.store.checkpoint_records import live
from skyrl_tinker.store.database.tables import Model, SavedCheckpoint, Session
from skyrl_tinker.store.owners import NO_PROJECT, in_project, owned_by

ACTIVE = "active"
CLIENT_FINISHED = "client_finished"
REASONS = ("success", "errored", "interrupted")
"""How a client may end its session; whatever else ended one was not the client."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """`reasons`: of CLIENT_FINISHED, None for any."""

    type: str
    reasons: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class SearchPosition:
    """The last session of the page before."""

    created_at: float
    session_id: str


@dataclass(frozen=True, slots=True)
class Search:
    """Everything that is set must hold; but a session of `session_id` or of `display_name` will do."""

    session_id: str | None
    display_name: str | None
    project_ids: Sequence[str] | None
    user_metadata: Mapping[str, str]
    statuses: Sequence[SessionStatus] | None
    after: SearchPosition | None


@dataclass(frozen=True, slots=True)
class SessionMatch:
    session_id: str
    created_at: float
    project_id: str
    finished_at: float | None
    finish_reason: str | None
    finish_detail: str | None
    display_name: str | None
    user_metadata: Mapping[str, Any]
    checkpoints: int
    checkpoint_bytes: int


async def search(
    conn: AsyncConnection, owner: OwnerId | None, wanted: Search, limit: int
) -> list[SessionMatch]:
    where = [owned_by(owner), *_conditions(wanted)]
    if wanted.after is not None:
        where.append(await _after(conn, owner, wanted.after))
    query = (
        select(
            Session.session_id,
            Session.created_at,
            func.coalesce(Session.project_id, NO_PROJECT),
            Session.finished_at,
            Session.finish_reason,
            Session.finish_detail,
            Session.display_name,
            Session.user_metadata,
            _of_checkpoints(func.count()),
            _of_checkpoints(func.coalesce(func.sum(SavedCheckpoint.size_bytes), 0)),
        )
        .where(*where)
        .order_by(Session.created_at.desc(), Session.session_id.desc())
        .limit(limit)
    )
    return [SessionMatch(*row) for row in await conn.execute(query)]


def _conditions(wanted: Search) -> list[ColumnElement[bool]]:
    conditions = [_has(key, value) for key, value in wanted.user_metadata.items()]
    if wanted.project_ids is not None:
        conditions.append(in_project(wanted.project_ids))
    if wanted.statuses is not None:
        conditions.append(or_(*(_is(status) for status in wanted.statuses)))
    names = []
    if wanted.session_id is not None:
        names.append(Session.session_id == wanted.session_id)
    if wanted.display_name is not None:
        names.append(and_(true(), *(_named(word) for word in wanted.display_name.split())))
    return [*conditions, or_(*names)] if names else conditions


def _named(word: str) -> ColumnElement[bool]:
    return Session.display_name.icontains(word, autoescape=True)


def _is(status: SessionStatus) -> ColumnElement[bool]:
    if status.type == ACTIVE:
        return Session.finished_at.is_(None)
    if status.type == CLIENT_FINISHED:
        return Session.finish_reason.in_(REASONS if status.reasons is None else status.reasons)
    return false()  # nothing here fails or cancels a whole session


def _has(key: str, value: str) -> ColumnElement[bool]:
    """Any JSON may be a value; it is compared in the form in which it is shown."""
    each = func.json_each(Session.user_metadata).table_valued("key", "value", "type")
    shown = case(
        (each.c.type == "text", each.c.value),
        (each.c.type.in_(("true", "false", "null")), each.c.type),
        else_=cast(each.c.value, String),
    )
    return select(each.c.key).where(each.c.key == key, shown == value).exists()


async def _after(conn: AsyncConnection, owner: OwnerId | None, cursor: SearchPosition) -> ColumnElement[bool]:
    """Times on the wire are rounded: the session itself tells its own exactly."""
    exact = select(Session.created_at).where(Session.session_id == cursor.session_id, owned_by(owner))
    created_at = await conn.scalar(exact)
    last = tuple_(cursor.created_at if created_at is None else created_at, cursor.session_id)
    return tuple_(Session.created_at, Session.session_id) < last


def _of_checkpoints(value: Any) -> Any:
    return (
        select(value)
        .select_from(SavedCheckpoint)
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .where(Model.session_id == Session.session_id, *live())
        .scalar_subquery()
    )
