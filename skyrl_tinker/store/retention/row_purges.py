"""Purges of old rows. Times are UTC seconds since the epoch; True: there may be more."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

from sqlalchemy import BindParameter, Connection, and_, bindparam, delete, exists, func, or_, select

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, RequestKind
from skyrl_tinker.store import server_state, usage_records
from skyrl_tinker.store.console.traced_requests import MOST
from skyrl_tinker.store.database.tables import (
    AdapterVersion,
    AuditEvent,
    Base,
    Future,
    KeyEvent,
    Request,
    Result,
    RunReport,
    SamplingSession,
    SavedCheckpoint,
    StabilityRecord,
    StepPoint,
    UsageRecord,
)
from skyrl_tinker.store.retention import slices
from skyrl_tinker.store.retention.slices import delete_some, some

_SWEPT = "samples_swept"  # no finished sample up to this id of a future is left
_SAMPLES = (RequestKind.SAMPLE, RequestKind.CANCEL_SAMPLE)
_SLICE: BindParameter[Any] = bindparam("slice")
_BEFORE: BindParameter[Any] = bindparam("before")
_OF: BindParameter[Any] = bindparam("of", expanding=True)
_DROP_BODIES = delete(Request).where(Request.future_id.in_(_OF))
_DROP_RESULTS = delete(Result).where(Result.id.in_(_OF))
_DROP_FUTURES = delete(Future).where(Future.id.in_(_OF))
_DROP_SAMPLERS = delete(SamplingSession).where(SamplingSession.version_id.in_(_OF))
_DROP_VERSIONS = delete(AdapterVersion).where(AdapterVersion.id.in_(_OF))
_OLDEST_RESULTS = (
    select(Result.id, Future.id.label("future_id"), Future.kind, Future.finished_at)
    .join(Future, Future.id == Result.future_id)
    .where(Result.id <= bindparam("counted"))
    .order_by(Result.id)
    .limit(_SLICE)
)
_NEWEST = select(func.max(Future.id))
_PROMPTS = delete(Request).where(
    Request.future_id.in_(
        select(Request.future_id)
        .join(Future, Future.id == Request.future_id)
        .where(
            Request.future_id <= bindparam("until"),
            Future.kind == RequestKind.SAMPLE,
            Future.status != FutureStatus.PENDING,
        )
        .order_by(Request.future_id)
        .limit(_SLICE)
    )
)
_OLDEST_FUTURES = (
    select(Future.id, Future.kind, Future.finished_at, Result.id.label("result"))
    .outerjoin(Result, Result.future_id == Future.id)
    .where(Future.id > bindparam("after"))
    .order_by(Future.id)
    .limit(_SLICE)
)
_MADE_ON = SamplingSession.version_id == AdapterVersion.id
_UNNEEDED = ~or_(
    exists().where(SavedCheckpoint.version_id == AdapterVersion.id),
    exists().where(_MADE_ON, AdapterVersion.inflight),
    exists().where(_MADE_ON, Future.sampling_session_id == SamplingSession.sampling_session_id),
)
_VERSIONS = select(AdapterVersion.id).where(AdapterVersion.dropped_at < _BEFORE, _UNNEEDED).limit(_SLICE)
_USAGE = some(UsageRecord, UsageRecord.id, UsageRecord.hour < _BEFORE)


def purge_results(conn: Connection, finished_before: float) -> bool:
    """Delete results whose usage is counted, with the prompts of samples. The futures stay.

    A late poll is told that its result expired.

    Results are in the order in which their futures finished, so only those deleted are read.
    """
    named = {"counted": usage_records.counted(conn), "slice": slices.SLICE}
    oldest = conn.execute(_OLDEST_RESULTS, named)
    gone = [row for row in oldest if row.finished_at < finished_before]
    samples = [row.future_id for row in gone if row.kind is RequestKind.SAMPLE]
    conn.execute(_DROP_BODIES, {"of": samples})
    conn.execute(_DROP_RESULTS, {"of": [row.id for row in gone]})
    return len(gone) == slices.SLICE


def purge_prompts(conn: Connection) -> bool:
    """Delete the bodies of finished samples that are not among the newest requests of all."""
    newest = conn.scalar(_NEWEST) or 0
    return delete_some(conn, _PROMPTS, until=newest - MOST)


def purge_samples(conn: Connection, finished_before: float) -> bool:
    """Delete samples that finished, and have no result any more, in the order in which they came.

    It stops at the first one that must stay for now, and goes on from there the next time.
    """
    swept = int(server_state.get(conn, _SWEPT) or 0)
    gone: list[int] = []
    passed = 0
    for row in conn.execute(_OLDEST_FUTURES, {"after": swept, "slice": slices.SLICE}):
        if row.kind in _SAMPLES:
            if row.finished_at is None or row.finished_at >= finished_before or row.result is not None:
                break
            gone.append(row.id)
        swept, passed = row.id, passed + 1
    if passed:
        conn.execute(_DROP_FUTURES, {"of": gone})
        server_state.put(conn, _SWEPT, swept)
    return passed == slices.SLICE


def purge_training(conn: Connection, model: ModelKey, before_seq: int, finished_before: float) -> bool:
    """Delete requests of a model in training that no replay needs.

    These are all before `before_seq`, that of its snapshot, and forwards behind it, which have no effect. Its
    first request stays, and so does the last that ran: the next engine goes on there. It stops at the first
    one that must stay for now.
    """
    ran = select(Future.seq_id).where(Future.model_key == model, Future.unit.is_not(None))
    last_ran = ran.order_by(Future.seq_id.desc()).limit(1).scalar_subquery()
    forward = and_(Future.kind == RequestKind.FORWARD, Future.effect.is_(None), Future.seq_id < last_ran)
    query = (
        select(Future.id, Future.finished_at, Result.id.label("result"))
        .outerjoin(Result, Result.future_id == Future.id)
        .where(Future.model_key == model, Future.seq_id > 0, or_(Future.seq_id < before_seq, forward))
        .order_by(Future.seq_id)
        .limit(slices.SLICE)
    )
    gone = [
        row.id
        for row in takewhile(
            lambda row: (
                row.result is None and row.finished_at is not None and row.finished_at < finished_before
            ),
            conn.execute(query),
        )
    ]
    conn.execute(_DROP_BODIES, {"of": gone})
    conn.execute(_DROP_FUTURES, {"of": gone})
    return len(gone) == slices.SLICE


def purge_versions(conn: Connection, dropped_before: float) -> bool:
    """Delete weight versions dropped before then, with the sampling sessions made on them.

    Versions of checkpoints stay, versions of which samples are recorded, and inflight ones with a sampling
    session, which follows newer versions.
    """
    gone = list(conn.scalars(_VERSIONS, {"before": dropped_before, "slice": slices.SLICE}))
    conn.execute(_DROP_SAMPLERS, {"of": gone})
    conn.execute(_DROP_VERSIONS, {"of": gone})
    return len(gone) == slices.SLICE


def purge_usage(conn: Connection, before: float) -> bool:
    return delete_some(conn, _USAGE, before=int(before // usage_records.HOUR_S))


def _purge(*tables: type[Base], by: str, key: str = "id") -> Callable[[Connection, float], bool]:
    """Return a purge of rows whose time in the column `by` is before the one given."""
    each = [some(table, getattr(table, key), getattr(table, by) < _BEFORE) for table in tables]

    def purge(conn: Connection, before: float) -> bool:
        more = [delete_some(conn, one, before=before) for one in each]
        return any(more)

    return purge


purge_stability = _purge(StabilityRecord, by="last_used_at", key="sequence_id")
purge_audit = _purge(AuditEvent, KeyEvent, by="at")
purge_points = _purge(StepPoint, RunReport, by="at")
purge_removed_checkpoints = _purge(SavedCheckpoint, by="removed_at")  # which are billed until then
