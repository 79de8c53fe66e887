"""Purges of sessions that ended. Times are UTC seconds since the epoch; True: there may be more."""

from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, bindparam, delete, exists, or_, select

from skyrl_tinker.domain.ids import FutureStatus, SessionId
from skyrl_tinker.store import session_records
from skyrl_tinker.store.database.tables import (
    AdapterVersion,
    AuditEvent,
    Future,
    Model,
    Request,
    Result,
    RunReport,
    SamplingSession,
    SavedCheckpoint,
    Session,
    StabilityRecord,
    StepPoint,
    UploadedLoss,
    UsageRecord,
)
from skyrl_tinker.store.retention import slices
from skyrl_tinker.store.retention.slices import delete_some, some

_DONE = Future.status != FutureStatus.PENDING


def ended_sessions(conn: Connection, finished_before: float) -> list[SessionId]:
    """Return finished sessions of which `clear_session` has something to delete, as far as is easily told."""
    return [SessionId(each) for each in conn.scalars(_ENDED, {"before": finished_before})]


def forgettable_sessions(conn: Connection, finished_before: float) -> list[SessionId]:
    """Return cleared sessions of which no checkpoint is left, and no weights that another one samples."""
    return [SessionId(each) for each in conn.scalars(_FORGETTABLE, {"before": finished_before})]


def clear_session(conn: Connection, session: SessionId) -> bool:
    """Delete requests, results, losses and sampling sessions of an ended session."""
    ended = select(Future.id).where(Future.session_id == session, _DONE).limit(slices.SLICE)
    futures = list(conn.scalars(ended))
    session_records.note_last_requests(conn, session)
    for table in (UploadedLoss, Result, Request):
        conn.execute(delete(table).where(table.future_id.in_(futures)))
    conn.execute(delete(Future).where(Future.id.in_(futures)))
    if len(futures) == slices.SLICE:
        return True
    return delete_some(conn, _UNUSED_SAMPLERS, session=session)


def forget_session(conn: Connection, session: SessionId) -> bool:
    """Delete the rest of a session, last of all itself."""
    if any(delete_some(conn, each, session=session) for each in _REST):
        return True
    conn.execute(delete(Model).where(Model.session_id == session))
    conn.execute(delete(Session).where(Session.session_id == session))
    return False


def _has_requests() -> ColumnElement[bool]:
    tables = (Future, UploadedLoss, SamplingSession)
    return or_(*(exists().where(table.session_id == Session.session_id) for table in tables))


_FINISHED = Session.finished_at < bindparam("before")
_OWN = Model.session_id == Session.session_id
_KEPT = or_(
    exists().where(_OWN, SavedCheckpoint.model_key == Model.key),
    exists().where(
        _OWN, AdapterVersion.model_key == Model.key, SamplingSession.version_id == AdapterVersion.id
    ),
    _has_requests(),
)
_ENDED = select(Session.session_id).where(_FINISHED, _has_requests())
_FORGETTABLE = select(Session.session_id).where(_FINISHED, ~_KEPT)
_SESSION: BindParameter[Any] = bindparam("session")
_SAMPLER = SamplingSession.sampling_session_id
_UNUSED_SAMPLERS = some(
    SamplingSession,
    _SAMPLER,
    SamplingSession.session_id == _SESSION,
    ~exists().where(Future.sampling_session_id == _SAMPLER),
)
_MODELS = select(Model.key).where(Model.session_id == _SESSION)
_REST = [
    some(AuditEvent, AuditEvent.id, AuditEvent.session_id == _SESSION),
    some(UsageRecord, UsageRecord.id, UsageRecord.session_id == _SESSION),
    some(StabilityRecord, StabilityRecord.sequence_id, StabilityRecord.session_id == _SESSION),
    *(some(each, each.id, each.model_key.in_(_MODELS)) for each in (StepPoint, RunReport, AdapterVersion)),
]
"""Deletions of what is left of a cleared session, in order."""
