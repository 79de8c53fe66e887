"""Queue of accepted requests, as the engine reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, bindparam, case, func, literal, literal_column, or_, select

from skyrl_tinker.domain.ids import (
    SAVES,
    FutureStatus,
    ModelKey,
    OwnerId,
    RequestId,
    RequestKind,
    SamplingSessionId,
    SessionId,
)
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Future, Model, Request, SamplingSession, Session

SMALL_BYTES = 4096
_IDS_AT_ONCE = 1000
IN_WINDOW = frozenset({RequestKind.FORWARD_BACKWARD, RequestKind.MISSING})
"""Kinds of which a failed one invalidates the gradients of its window: it had, or may have had, some."""


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """Accepted request, as the engine schedules it. A failed one runs nothing, yet keeps its place.

    `base_model`: that of its model or sampling session. Of a sample: `body` where it is small, which saves a
    read; `tokens`: the most that it computes, prompt included; `sequences`: as many as SampleRequest.places.
    """

    id: int
    request_id: RequestId
    kind: RequestKind
    session_id: SessionId
    owner_id: OwnerId | None
    model_key: ModelKey | None
    sampling_session_id: SamplingSessionId | None
    seq_id: int | None
    status: FutureStatus
    body_bytes: int
    created_at: float
    body: bytes | None = None  # of requests that cancel a sample, too
    tokens: int = 1
    sequences: int = 1
    base_model: str | None = None


# Beside a partial index SQLite plans a statement anew each time that it gets a bound value for this column.
_WAITING = or_(
    Future.status == literal_column("'pending'"),
    and_(
        Future.status == literal_column("'failed'"), Future.model_key.is_not(None), Future.seq_id.is_not(None)
    ),
)
# Training requests may wait for hours, and the read of a unit's bodies also finds those that ended meanwhile.
_SMALL_SAMPLE = case(
    (
        and_(
            or_(
                Future.kind == literal(RequestKind.SAMPLE, Future.kind.type),
                Future.kind == literal(RequestKind.CANCEL_SAMPLE, Future.kind.type),
            ),
            func.length(Request.body) <= SMALL_BYTES,
        ),
        Request.body,
    )
)
_QUEUED = Prepared(
    select(
        Future.id,
        Future.request_id,
        Future.kind,
        Future.session_id,
        Session.owner_id,
        Future.model_key,
        Future.sampling_session_id,
        Future.seq_id,
        Future.status,
        func.coalesce(func.length(Request.body), 0),
        Future.created_at,
        _SMALL_SAMPLE,
        func.coalesce(Future.tokens, 1),
        func.coalesce(Future.sequences, 1),
        func.coalesce(SamplingSession.base_model, Model.base_model),
    )
    .join(Session, Session.session_id == Future.session_id)
    .outerjoin(SamplingSession, SamplingSession.sampling_session_id == Future.sampling_session_id)
    .outerjoin(Model, Model.key == Future.model_key)
    .outerjoin(Request, Request.future_id == Future.id)
    .where(Future.id > bindparam("cursor"), _WAITING)
    .order_by(Future.id)
    .limit(bindparam("most"))
)
_FIRST_PENDING = (
    select(Future.id)
    .where(Future.status == literal_column("'pending'"))  # a bound value would not use the partial index
    .order_by(Future.id)
    .limit(1)
)
_FIRST_FROM = Prepared(
    select(func.min(Future.id).label("first")).where(
        Future.model_key == bindparam("model_key"), Future.seq_id >= bindparam("seq_id")
    )
)
# A condition on the status would have SQLite plan it anew each time, in ten times the time of its run.
_BODIES = (
    select(Request.future_id, Request.body, Future.status)
    .join(Future, Future.id == Request.future_id)
    .where(Request.future_id.in_(bindparam("future_ids", expanding=True)))
)


def window_failure(kind: RequestKind, seq_id: int | None, how: str, why: str) -> str:
    """Return why the gradients of a window are invalid, given its first request that failed."""
    return why if kind is RequestKind.MISSING else f"{kind} with seq_id {seq_id} {how}: {why}"


def queued_after(conn: Connection, cursor: int, limit: int = 1000) -> list[QueuedRow]:
    """Return rows with id > cursor, by id: pending ones, and a model's that failed on submission."""
    return [QueuedRow(*row) for row in _QUEUED.rows(conn, {"cursor": cursor, "most": limit})]


def read_bodies(conn: Connection, ids: Sequence[int], *, ended: bool = False) -> dict[int, bytes]:
    """Return bodies by future id; without `ended` those of requests that have finished are left out."""
    rows = conn.execute(_BODIES, {"future_ids": ids})
    return {row.future_id: row.body for row in rows if ended or row.status is FutureStatus.PENDING}


def pending_of(conn: Connection, model: ModelKey) -> list[int]:
    """Return the ids of a model's requests that have not finished; it can be unloaded in any state."""
    query = select(Future.id).where(
        Future.model_key == model,
        Future.status == FutureStatus.PENDING,
        Future.kind != RequestKind.UNLOAD_MODEL,
    )
    return list(conn.scalars(query))


def saves_among(conn: Connection, ids: Sequence[int]) -> set[tuple[ModelKey, int]]:
    """Return model and id of those futures that are saves."""
    found: set[tuple[ModelKey, int]] = set()
    for start in range(0, len(ids), _IDS_AT_ONCE):
        some = Future.id.in_(ids[start : start + _IDS_AT_ONCE])
        query = select(Future.model_key, Future.id).where(some, Future.kind.in_(SAVES))
        found |= {(ModelKey(model), number) for model, number in conn.execute(query) if model is not None}
    return found


def before_waiting(conn: Connection, next_seqs: Mapping[ModelKey, int]) -> int:
    """Return the id before the first request that waits; the newest id if none does.

    `next_seqs`: of the models in training, the next seq_id. Failed requests from there on wait, too.
    """
    firsts = [conn.scalar(_FIRST_PENDING), *(_first_from(conn, *each) for each in next_seqs.items())]
    waiting = [first for first in firsts if first is not None]
    return min(waiting) - 1 if waiting else conn.scalar(select(func.max(Future.id))) or 0


def _first_from(conn: Connection, model: ModelKey, seq_id: int) -> int | None:
    row = _FIRST_FROM.row(conn, {"model_key": model, "seq_id": seq_id})
    return None if row is None else row.first
