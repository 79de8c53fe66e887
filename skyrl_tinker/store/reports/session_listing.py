"""Sessions as REST shows them: listed, summed up, searched, put into projects."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import orjson
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

from skyrl_tinker.domain.ids import OwnerId, Reach, SessionId
from skyrl_tinker.errors import found
from skyrl_tinker.protocol.schemas.session_list import (
    SearchCursor,
    SessionContents,
    SessionSearchRequest,
    StatusQuery,
)
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.checkpoint_records import is_live
from skyrl_tinker.store.database.rows import AnyRow, total
from skyrl_tinker.store.database.tables import ApiKey, Model, SamplingSession, SavedCheckpoint, Session
from skyrl_tinker.store.owners import NO_PROJECT, OWNER_NAME, in_project, require_session, within
from skyrl_tinker.store.session_records import AT_ONCE

REASONS = ("success", "errored", "interrupted")
"""Reasons with which clients finish sessions; all others are the server's."""
_NUL = r"(?<!\\)(\\\\)*\\u0000"
"""Regular expression of JSON that holds the character NUL, which PostgreSQL cannot make text of."""


def list_ids(conn: Connection, reach: Reach, limit: int, offset: int) -> list[str]:
    """Return a page of session ids, newest first."""
    query = select(Session.session_id).where(within(reach))
    query = query.order_by(Session.created_at.desc(), Session.session_id.desc()).limit(limit).offset(offset)
    return list(conn.scalars(query))


def contents(conn: Connection, reach: Reach, session_id: SessionId) -> SessionContents:
    """Return all that the session has created. Raises NotFoundError if the caller sees no such session."""
    query = select(Session.user_metadata, Session.display_name)
    session = conn.execute(query.where(Session.session_id == session_id, within(reach))).one_or_none()
    row = found(session, f"no session {session_id}")
    runs = select(Model.model_id).where(Model.session_id == session_id).order_by(Model.key)
    samplers = (
        select(SamplingSession.sampling_session_id)
        .where(SamplingSession.session_id == session_id)
        .order_by(SamplingSession.created_at, SamplingSession.sampling_session_seq_id)
    )
    return SessionContents(
        training_run_ids=list(conn.scalars(runs)), sampler_ids=list(conn.scalars(samplers)), **row._mapping
    )


def find_labels(conn: Connection, reach: Reach, session_ids: Collection[str]) -> dict[str, AnyRow]:
    """Return `owner`, a name, and `project_id` by session id, for those sessions that the caller sees."""
    query = (
        select(Session.session_id, OWNER_NAME.label("owner"), Session.project_id)
        .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
        .where(within(reach))
    )
    wanted, found = sorted(session_ids), dict[str, AnyRow]()
    for first in range(0, len(wanted), AT_ONCE):
        part = query.where(Session.session_id.in_(wanted[first : first + AT_ONCE]))
        found |= {row.session_id: row for row in conn.execute(part)}
    return found


def metadata_of(conn: Connection, session_ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the metadata of a few sessions whose labels the caller has found."""
    query = select(Session.session_id, Session.user_metadata).where(Session.session_id.in_(session_ids))
    return {row.session_id: row.user_metadata for row in conn.execute(query)}


def set_project(conn: Connection, owner: OwnerId | None, session_id: SessionId, project_id: str) -> None:
    """Move a session, with all that it has created, into a project. Raises NotFoundError."""
    require_session(conn, owner, session_id)
    conn.execute(update(Session).where(Session.session_id == session_id).values(project_id=project_id))
    audit_log.record(conn, session_id, "project_session_add", project_id=project_id)


def search(
    conn: Connection, reach: Reach, wanted: SessionSearchRequest, owners: Sequence[str] | None, limit: int
) -> Iterator[AnyRow]:
    """Yield the matching sessions that the caller sees, newest first, from behind the cursor.

    Rows have the names of SessionSummary; `owner` is a name, times are seconds since the epoch.

    `owners`: names; None: any. Of `session_id` and `display_name` one suffices.
    """
    where = [within(reach), *_where(conn, wanted)]
    if owners is not None:
        where.append(OWNER_NAME.in_(owners))
    if wanted.cursor is not None:
        where.append(_older(conn, reach, wanted.cursor))
    query = (
        select(
            Session.session_id,
            OWNER_NAME.label("owner"),
            Session.created_at,
            func.coalesce(Session.project_id, NO_PROJECT).label("project_id"),
            Session.finished_at,
            Session.finish_reason,
            Session.finish_detail,
            Session.display_name,
            Session.user_metadata,
            _of_checkpoints(conn, func.count()).label("checkpoints_count"),
            _of_checkpoints(conn, func.coalesce(total(SavedCheckpoint.size_bytes), 0)).label(
                "checkpoint_storage_bytes"
            ),
        )
        .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
        .where(*where)
        .order_by(Session.created_at.desc(), Session.session_id.desc())
        .limit(limit)
    )
    yield from conn.execute(query)


def _where(conn: Connection, wanted: SessionSearchRequest) -> list[ColumnElement[bool]]:
    where = [_has_metadata(conn, key, value) for key, value in wanted.user_metadata.items()]
    if wanted.project_ids is not None:
        where.append(in_project(wanted.project_ids))
    if wanted.statuses is not None:
        where.append(or_(*(_has_status(status) for status in wanted.statuses)))
    names = []
    if wanted.session_id is not None:
        names.append(Session.session_id == wanted.session_id)
    if wanted.display_name is not None:
        words = wanted.display_name.split()
        names.append(and_(true(), *(Session.display_name.icontains(word, autoescape=True) for word in words)))
    return [*where, or_(*names)] if names else where


def _has_status(status: StatusQuery) -> ColumnElement[bool]:
    if status.type == "active":
        return Session.finished_at.is_(None)
    if status.type == "client_finished":
        return Session.finish_reason.in_(REASONS if status.reasons is None else status.reasons)
    return false()  # this server fails or cancels no whole session


def _has_metadata(conn: Connection, key: str, value: str) -> ColumnElement[bool]:
    """Compare a value, which may be any JSON, in its displayed form: compact JSON, or the text itself."""
    if conn.dialect.name == "postgresql":
        text = cast(Session.user_metadata, String)
        readable = case((~text.regexp_match(_NUL), Session.user_metadata))  # else it would raise
        pair = func.json_each_text(readable).table_valued("key", "value")
        return (
            select(pair.c.key).where(pair.c.key == key, func.coalesce(pair.c.value, "null") == value).exists()
        )
    entry = func.json_each(Session.user_metadata).table_valued("key", "value", "type")
    same = [
        and_(entry.c.type.in_(("text", "array", "object")), entry.c.value == value),
        and_(entry.c.type.in_(("true", "false", "null")), entry.c.type == value),
    ]
    if (number := _number(value)) is not None:
        read = number if abs(number) < 2**63 else float(number)  # SQLite has no larger integers
        near = entry.c.type.in_(("integer", "real")), entry.c.value == read
        same.append(and_(*near, func.json_member(Session.user_metadata, key) == value))
    return select(entry.c.key).where(entry.c.key == key, or_(*same)).exists()


def _number(text: str) -> int | float | None:
    """Return the number that is displayed so, None if none is."""
    try:
        number = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return number if is_number and orjson.dumps(number).decode() == text else None


def _older(conn: Connection, reach: Reach, cursor: SearchCursor) -> ColumnElement[bool]:
    """Compare with the exact time of the cursor's session: times on the wire are rounded."""
    exact = select(Session.created_at).where(Session.session_id == cursor.last_session_id, within(reach))
    created_at = conn.scalar(exact)
    at = cursor.last_created_at.timestamp() if created_at is None else created_at
    last = tuple_(at, cursor.last_session_id)
    return tuple_(Session.created_at, Session.session_id) < last


def _of_checkpoints(conn: Connection, value: Any) -> Any:
    return (
        select(value)
        .select_from(SavedCheckpoint)
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .where(Model.session_id == Session.session_id, *is_live(conn))
        .scalar_subquery()
    )
