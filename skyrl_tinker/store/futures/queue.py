"""The journal of requests: submit once, finish once, fetch any number of times."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, bindparam, case, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.domain.ids import (
    FutureStatus,
    ModelId,
    ModelKey,
    OwnerId,
    RequestId,
    RequestKind,
    SamplingSessionId,
    SessionId,
)
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Future, Model, Request, Result, Session
from skyrl_tinker.store.futures.finish import (
    fail,
    fail_pending,
    failure_body,
    purge_results,
    succeed,
    succeed_all,
)
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.submit_sample import submit_sample
from skyrl_tinker.store.futures.submit_training import submit_create, submit_custom_loss, submit_training

__all__ = [
    "Accepted",
    "Outcome",
    "QueuedRow",
    "bodies",
    "fail",
    "fail_pending",
    "failure_body",
    "finished_after",
    "last_result_id",
    "max_id",
    "outcome",
    "outcomes",
    "purge_results",
    "queued_after",
    "submit_create",
    "submit_custom_loss",
    "submit_sample",
    "submit_training",
    "succeed",
    "succeed_all",
]


ANY_SIZE = 1 << 62
SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """What the engine schedules by. A failed row has nothing to run, yet its turn counts."""

    id: int
    request_id: RequestId
    kind: RequestKind
    session_id: SessionId
    model_key: ModelKey | None
    sampling_session_id: SamplingSessionId | None
    seq_id: int | None
    status: FutureStatus
    body_bytes: int
    created_at: float
    body: bytes | None = None  # of a small sample, where it saves a read, and of what cancels one


@dataclass(frozen=True, slots=True)
class Outcome:
    """`body` None: pending, or purged if `status` says finished. Failures are JSON {"error", "category"}."""

    future_id: int
    request_id: RequestId
    kind: RequestKind
    status: FutureStatus
    content_type: str | None
    body: bytes | None
    model_id: ModelId | None
    owner_id: OwnerId | None
    withheld: bool | None = None  # there is a body, larger than what was asked for


_WAITING = or_(
    Future.status == literal(FutureStatus.PENDING, Future.status.type),
    and_(
        Future.status == literal(FutureStatus.FAILED, Future.status.type),
        Future.model_key.is_not(None),
        Future.seq_id.is_not(None),
    ),
)
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
        Future.model_key,
        Future.sampling_session_id,
        Future.seq_id,
        Future.status,
        func.coalesce(func.length(Request.body), 0),
        Future.created_at,
        _SMALL_SAMPLE,
    )
    .outerjoin(Request, Request.future_id == Future.id)
    .where(Future.id > bindparam("cursor"), _WAITING)
    .order_by(Future.id)
    .limit(bindparam("most"))
)
_BODIES = select(Request.future_id, Request.body).where(
    Request.future_id.in_(bindparam("future_ids", expanding=True))
)
_OUTCOME = (
    Future.id,
    Future.request_id,
    Future.kind,
    Future.status,
    Result.content_type,
    case((func.length(Result.body) <= bindparam("most"), Result.body)).label("body"),
    Model.model_id,
    Session.owner_id,
    (func.length(Result.body) > bindparam("most")).label("withheld"),
)
_OUTCOMES = (
    select(*_OUTCOME)
    .outerjoin(Result, Result.future_id == Future.id)
    .outerjoin(Model, Model.key == Future.model_key)
    .outerjoin(Session, Session.session_id == Future.session_id)
    .where(Future.request_id.in_(bindparam("request_ids", expanding=True)))
)
_FINISHED = Prepared(
    select(Result.id.label("cursor"), *_OUTCOME)
    .join(Future, Future.id == Result.future_id)
    .outerjoin(Model, Model.key == Future.model_key)
    .outerjoin(Session, Session.session_id == Future.session_id)
    .where(Result.id > bindparam("cursor"))
    .order_by(Result.id)
)


async def queued_after(conn: AsyncConnection, cursor: int, limit: int = 1000) -> list[QueuedRow]:
    """Rows with id > cursor, by id, that are pending, or failed (at the door) on a model's lane."""
    return [QueuedRow(*row) for row in _QUEUED.rows(conn, {"cursor": cursor, "most": limit})]


async def bodies(conn: AsyncConnection, ids: Sequence[int]) -> dict[int, bytes]:
    """Bodies by future id; those that finished meanwhile are left out."""
    return {row.future_id: row.body for row in await conn.execute(_BODIES, {"future_ids": ids})}


async def max_id(conn: AsyncConnection) -> int:
    """The newest future's id, 0 if there is none."""
    return await conn.scalar(select(func.max(Future.id))) or 0


async def outcome(conn: AsyncConnection, request_id: RequestId, most_bytes: int = ANY_SIZE) -> Outcome | None:
    """None for an id that was never given out. A result above `most_bytes` is withheld."""
    found = await outcomes(conn, [request_id], most_bytes)
    return found[0] if found else None


async def outcomes(
    conn: AsyncConnection, request_ids: Sequence[RequestId], most_bytes: int = ANY_SIZE
) -> list[Outcome]:
    """Of the ids that were given out, in no particular order."""
    rows = await conn.execute(_OUTCOMES, {"request_ids": request_ids, "most": most_bytes})
    return [Outcome(*row) for row in rows]


async def finished_after(
    conn: AsyncConnection, cursor: int, most_bytes: int = ANY_SIZE
) -> list[tuple[int, Outcome]]:
    """(results.id, outcome) of what finished after the cursor, in that order. Large results are withheld."""
    rows = _FINISHED.rows(conn, {"cursor": cursor, "most": most_bytes})
    return [(row[0], Outcome(*row[1:])) for row in rows]


async def last_result_id(conn: AsyncConnection) -> int:
    """The cursor at which nothing newer has finished, 0 at first."""
    return await conn.scalar(select(func.max(Result.id))) or 0
