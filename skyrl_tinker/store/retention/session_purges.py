"""Purges of sessions that ended. Times are UTC seconds since the epoch; True: there may be more."""

from sqlalchemy import ColumnElement, Connection, delete, exists, or_, select

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
from skyrl_tinker.store.retention.slices import delete_some

_DONE = Future.status != FutureStatus.PENDING


def ended_sessions(conn: Connection, finished_before: float) -> list[SessionId]:
    """Return finished sessions of which `clear_session` has something to delete, as far as is easily told."""
    query = select(Session.session_id).where(Session.finished_at < finished_before, _has_requests())
    return [SessionId(each) for each in conn.scalars(query)]


def forgettable_sessions(conn: Connection, finished_before: float) -> list[SessionId]:
    """Return cleared sessions of which no checkpoint is left, and no weights that another one samples."""
    own = Model.session_id == Session.session_id
    saved = exists().where(own, SavedCheckpoint.model_key == Model.key)
    sampled = exists().where(
        own, AdapterVersion.model_key == Model.key, SamplingSession.version_id == AdapterVersion.id
    )
    kept = or_(saved, sampled, _has_requests())
    query = select(Session.session_id).where(Session.finished_at < finished_before, ~kept)
    return [SessionId(each) for each in conn.scalars(query)]


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
    key = SamplingSession.sampling_session_id
    unused = ~exists().where(Future.sampling_session_id == key)
    return delete_some(conn, SamplingSession, key, SamplingSession.session_id == session, unused)


def forget_session(conn: Connection, session: SessionId) -> bool:
    """Delete the rest of a session, last of all itself."""
    of_session = (AuditEvent, AuditEvent.id), (UsageRecord, UsageRecord.id)
    for table, key in (*of_session, (StabilityRecord, StabilityRecord.sequence_id)):
        if delete_some(conn, table, key, table.session_id == session):
            return True
    models = select(Model.key).where(Model.session_id == session)
    for of_model in (StepPoint, RunReport, AdapterVersion):
        if delete_some(conn, of_model, of_model.id, of_model.model_key.in_(models)):
            return True
    conn.execute(delete(Model).where(Model.session_id == session))
    conn.execute(delete(Session).where(Session.session_id == session))
    return False


def _has_requests() -> ColumnElement[bool]:
    tables = (Future, UploadedLoss, SamplingSession)
    return or_(*(exists().where(table.session_id == Session.session_id) for table in tables))
