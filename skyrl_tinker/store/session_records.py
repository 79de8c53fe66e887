"""Client sessions: live while they send heartbeats, refused once finished."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    JSON,
    BindParameter,
    ColumnElement,
    Connection,
    bindparam,
    case,
    func,
    insert,
    or_,
    select,
    update,
)

from skyrl_tinker.domain.ids import ModelState, OwnerId, SessionId
from skyrl_tinker.errors import GoneError, NotFoundError, found
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import AnyRow, database_time
from skyrl_tinker.store.database.tables import Future, Model, SamplingSession, Session

HELD = (ModelState.CREATING, ModelState.READY, ModelState.PARKED)
"""States of models that have a state to release."""
BEAT_S = 10.0
"""Time between two heartbeats of the SDK."""
MOST_BEATS = 2.5
"""Heartbeats after which one has certainly come, unless the client is away: one in two may be lost."""
AT_ONCE = 500  # sessions that end by silence in one sweep
Beat = tuple[OwnerId | None, SessionId]
_NEWEST = (
    select(Future.created_at)
    .where(Future.model_key == Model.key, Future.seq_id.is_not(None))
    .order_by(Future.seq_id.desc())
    .limit(1)
    .scalar_subquery()
)
LAST_REQUEST_AT = case((Model.last_request_at < _NEWEST, _NEWEST), else_=Model.last_request_at)
"""In a query of models: time of the last request, UTC seconds. The column has the time noted so far."""


def create(
    conn: Connection,
    *,
    owner: OwnerId | None,
    sdk_version: str,
    tags: Sequence[str] = (),
    user_metadata: Mapping[str, Any] = MappingProxyType({}),
    project_id: str | None = None,
    display_name: str | None = None,
    session_id: SessionId | None = None,
) -> SessionId:
    """Create a session; `session_id`, by default random, must be new."""
    session_id = session_id or SessionId(str(uuid4()))
    now = database_time(conn)
    row = insert(Session).values(
        session_id=session_id,
        owner_id=owner,
        created_at=now,
        last_heartbeat_at=now,
        tags=list(tags),
        user_metadata=dict(user_metadata),
        project_id=project_id,
        display_name=display_name,
        sdk_version=sdk_version,
    )
    conn.execute(row)
    audit_log.record(conn, session_id, "session_create", project_id=project_id, display_name=display_name)
    return session_id


def heartbeat(conn: Connection, beats: Sequence[Beat]) -> dict[Beat, NotFoundError | GoneError]:
    """Keep sessions alive; return why some are not: their owner has none such, or it is finished."""
    rows = _BEATING.rows(conn, {"of": dict.fromkeys(session_id for _, session_id in beats)})
    there = {(row.owner_id, row.session_id): row for row in rows}
    live: dict[SessionId, None] = {}
    failed: dict[Beat, NotFoundError | GoneError] = {}
    for beat in set(beats):
        try:
            check_live(found(there.get(beat), f"no session {beat[1]}"))
            live[beat[1]] = None
        except (NotFoundError, GoneError) as error:
            failed[beat] = error
    _BEAT.change(conn, {"of": live, "now": database_time(conn)})
    return failed


def beats(conn: Connection, session_id: SessionId, now: float) -> bool:
    """Return whether a session's heartbeats go on, the first of which comes after BEAT_S."""
    row = _LAST_BEAT.row(conn, {"of": session_id})
    return row is not None and not row.finished_at and now - row.last_heartbeat_at < MOST_BEATS * BEAT_S


def finish(conn: Connection, session_id: SessionId, reason: str, detail: str | None) -> None:
    """Finish a session; the first reason stays. Raises NotFoundError for an unknown session."""
    end = (
        update(Session)
        .where(Session.session_id == session_id, Session.finished_at.is_(None))
        .values(finished_at=database_time(conn), finish_reason=reason, finish_detail=detail)
    )
    if conn.execute(end).rowcount:
        audit_log.record(conn, session_id, "session_finish", reason=reason, detail=detail)
    else:
        _session(conn, session_id)


def note_last_requests(conn: Connection, session_id: SessionId) -> None:
    """Note when the models of a session had their last requests, which will be deleted."""
    of_session = update(Model).where(Model.session_id == session_id)
    conn.execute(of_session.values(last_request_at=LAST_REQUEST_AT))


def owner_of(conn: Connection, session_id: SessionId) -> OwnerId | None:
    """Return the owner of a session that exists."""
    owner = conn.scalar(select(Session.owner_id).where(Session.session_id == session_id))
    return None if owner is None else OwnerId(owner)


def require_live(conn: Connection, session_id: SessionId) -> None:
    """Raise NotFoundError for an unknown session, GoneError for a finished one."""
    check_live(_session(conn, session_id))


def check_live(row: AnyRow) -> None:
    """Raise GoneError if the row's session (session_id, finished_at, finish_reason) is finished."""
    if row.finished_at is not None:
        raise GoneError(f"session {row.session_id} is finished ({row.finish_reason}): create a new one")


def list_expired(conn: Connection, now: float, timeout_s: float, parked_s: float) -> list[SessionId]:
    """Return the sessions to end: silent for `timeout_s`, or finished with models that are not released.

    Silent: without heartbeat, training request and sample. With parked models only a session may be silent
    for `parked_s`: its client has nothing to do meanwhile. Of many, those AT_ONCE with the oldest heartbeats.
    """
    bounds = {"since": now - timeout_s, "parked_since": now - parked_s, "most": AT_ONCE}
    silent = conn.scalars(_SILENT, bounds)
    return [SessionId(session_id) for session_id in (*silent, *conn.scalars(_LEFT))]


def finish_reasons(conn: Connection, since: float) -> dict[SessionId, str]:
    """Return why sessions are finished that were finished at a time, UTC seconds, or later."""
    found = _REASONS.rows(conn, {"since": since})
    return {SessionId(row.session_id): row.finish_reason for row in found}


def _has(*states: ModelState) -> ColumnElement[bool]:
    """Return SQL: a model of the session is in one of these states."""
    of_session = Model.session_id == Session.session_id
    return select(Model.key).where(of_session, Model.state.in_(states)).exists()


def _trains(since: BindParameter[float]) -> ColumnElement[bool]:
    """Return SQL: a model of the session has had a request since then."""
    of_session = Model.session_id == Session.session_id
    return select(Model.key).where(of_session, since <= LAST_REQUEST_AT).exists()


def _samples(since: BindParameter[float]) -> ColumnElement[bool]:
    """Return SQL: the last sample of a sampling session, by seq_id, came since then."""
    of_sampler = Future.sampling_session_id == SamplingSession.sampling_session_id
    last = select(Future.created_at).where(of_sampler).order_by(Future.seq_id.desc()).limit(1)
    of_session = SamplingSession.session_id == Session.session_id
    return (
        select(SamplingSession.sampling_session_id)
        .where(of_session, last.scalar_subquery() >= since)
        .exists()
    )


_SINCE = bindparam("since", type_=Session.last_heartbeat_at.type)
_SILENT = (
    select(Session.session_id)
    .where(
        Session.finished_at.is_(None),
        Session.last_heartbeat_at < _SINCE,
        or_(
            Session.last_heartbeat_at < bindparam("parked_since"),
            ~_has(ModelState.PARKED),
            _has(ModelState.CREATING, ModelState.READY),
        ),
        ~_trains(_SINCE),
        ~_samples(_SINCE),
    )
    .order_by(Session.last_heartbeat_at)
    .limit(bindparam("most"))
)
_LEFT = (
    select(Session.session_id)
    .join(Model, Model.session_id == Session.session_id)
    .where(Model.state.in_(HELD), Session.finished_at.is_not(None))
    .distinct()
)
_ENDS = select(Session.session_id, Session.finished_at, Session.finish_reason)
_SESSION = Prepared(_ENDS.where(Session.session_id == bindparam("of")))
_KEYS = func.json_each(bindparam("of", type_=JSON())).table_valued("key")  # both databases have it
_NAMED = Session.session_id.in_(select(_KEYS.c.key))
_BEATING = Prepared(_ENDS.add_columns(Session.owner_id).where(_NAMED))
# by name alone: with a condition on `finished_at` SQLite goes through all live sessions, along its index
_BEAT = Prepared(update(Session).where(_NAMED).values(last_heartbeat_at=bindparam("now")))
_LAST_BEAT = Prepared(
    select(Session.last_heartbeat_at, Session.finished_at).where(Session.session_id == bindparam("of"))
)
_REASONS = Prepared(
    select(Session.session_id, Session.finish_reason).where(Session.finished_at >= bindparam("since"))
)


def _session(conn: Connection, session_id: SessionId) -> AnyRow:
    return found(_SESSION.row(conn, {"of": session_id}), f"no session {session_id}")
