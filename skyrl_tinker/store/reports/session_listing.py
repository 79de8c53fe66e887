"""Searching sessions: newest first, page by page from where the last page ended."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    String,
    and_,
    case,
    cast,
    false,
    func,
    or_,
    select,
    true,
    tuple_,
    update,
)

from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.checkpoint_records import is_live
from skyrl_tinker.store.database.tables import Model, SamplingSession, SavedCheckpoint, Session
from skyrl_tinker.store.owners import NO_PROJECT, in_project, owned_by, require_session

ACTIVE = "active"
CLIENT_FINISHED = "client_finished"
REASONS = ("success", "errored", "interrupted")
"""How a client may end its session; whatever else ended one was not the client."""


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """What a session has made."""

    training_runs: list[str]
    samplers: list[str]
    user_metadata: Mapping[str, Any]
    display_name: str | None


@dataclass(frozen=True, slots=True)
class Labels:
    project_id: str | None
    user_metadata: Mapping[str, Any]


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


def list_ids(conn: Connection, owner: OwnerId | None, limit: int, offset: int) -> list[str]:
    """Ids, newest first."""
    query = select(Session.session_id).where(owned_by(owner))
    query = query.order_by(Session.created_at.desc(), Session.session_id.desc()).limit(limit).offset(offset)
    return list(conn.scalars(query))


def totals(conn: Connection, owner: OwnerId | None, session_id: SessionId) -> SessionTotals:
    """NotFoundError if this owner has no such session."""
    query = select(Session.user_metadata, Session.display_name)
    row = conn.execute(query.where(Session.session_id == session_id, owned_by(owner))).one_or_none()
    if row is None:
        raise NotFoundError(f"no session {session_id}")
    runs = select(Model.model_id).where(Model.session_id == session_id).order_by(Model.key)
    samplers = (
        select(SamplingSession.sampling_session_id)
        .where(SamplingSession.session_id == session_id)
        .order_by(SamplingSession.created_at, SamplingSession.sampling_session_seq_id)
    )
    return SessionTotals(
        list(conn.scalars(runs)),
        list(conn.scalars(samplers)),
        row.user_metadata,
        row.display_name,
    )


def find_labels(conn: Connection, owner: OwnerId | None, wanted: Collection[str]) -> dict[str, Labels]:
    """By session id, of those that are this owner's."""
    query = select(Session.session_id, Session.project_id, Session.user_metadata).where(owned_by(owner))
    rows = conn.execute(query)
    return {id_: Labels(project, metadata) for id_, project, metadata in rows if id_ in wanted}


def set_project(conn: Connection, owner: OwnerId | None, session_id: SessionId, project_id: str) -> None:
    """With all that the session has made. NotFoundError if this owner has no such session."""
    require_session(conn, owner, session_id)
    conn.execute(update(Session).where(Session.session_id == session_id).values(project_id=project_id))
    audit_log.record(conn, session_id, "project_session_add", project_id=project_id)


def search(conn: Connection, owner: OwnerId | None, wanted: Search, limit: int) -> list[SessionMatch]:
    where = [owned_by(owner), *_conditions(wanted)]
    if wanted.after is not None:
        where.append(_after(conn, owner, wanted.after))
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
    return [SessionMatch(*row) for row in conn.execute(query)]


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


def _after(conn: Connection, owner: OwnerId | None, cursor: SearchPosition) -> ColumnElement[bool]:
    """Times on the wire are rounded: the session itself tells its own exactly."""
    exact = select(Session.created_at).where(Session.session_id == cursor.session_id, owned_by(owner))
    created_at = conn.scalar(exact)
    last = tuple_(cursor.created_at if created_at is None else created_at, cursor.session_id)
    return tuple_(Session.created_at, Session.session_id) < last


def _of_checkpoints(value: Any) -> Any:
    return (
        select(value)
        .select_from(SavedCheckpoint)
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .where(Model.session_id == Session.session_id, *is_live())
        .scalar_subquery()
    )
