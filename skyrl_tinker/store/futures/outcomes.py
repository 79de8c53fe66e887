"""Outcomes of requests, as long polls read them."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, case, func, select

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, RequestId, RequestKind, SamplingSessionId
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import PAGE
from skyrl_tinker.store.database.tables import Future, Result, Session

ANY_SIZE = 1 << 62


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status and result of a request; failures are JSON {"error", "category"}.

    `body` None: pending, or purged if `status` is finished. `owner_id`: looked up by id only.
    """

    future_id: int
    request_id: RequestId
    kind: RequestKind
    status: FutureStatus
    content_type: str | None
    body: bytes | None
    sampling_session_id: SamplingSessionId | None
    withheld: bool | None  # there is a body, larger than the size asked for
    owner_id: OwnerId | None = None


_OUTCOME = (
    Future.id,
    Future.request_id,
    Future.kind,
    Future.status,
    Result.content_type,
    case((func.length(Result.body) <= bindparam("most"), Result.body)).label("body"),
    Future.sampling_session_id,
    (func.length(Result.body) > bindparam("most")).label("withheld"),
)
_ALL = (
    select(*_OUTCOME, Session.owner_id)
    .outerjoin(Result, Result.future_id == Future.id)
    .outerjoin(Session, Session.session_id == Future.session_id)
)
_OUTCOME_OF = Prepared(_ALL.where(Future.request_id == bindparam("request_id")))
_OUTCOMES = _ALL.where(Future.request_id.in_(bindparam("request_ids", expanding=True)))
_FINISHED = Prepared(
    select(Result.id.label("cursor"), *_OUTCOME)
    .join(Future, Future.id == Result.future_id)
    .where(Result.id > bindparam("cursor"))
    .order_by(Result.id)
    .limit(bindparam("count"))
)


def find(conn: Connection, request_id: RequestId, most_bytes: int = ANY_SIZE) -> Outcome | None:
    """Return the outcome of a request, None if it is unknown. A result above `most_bytes` is withheld."""
    row = _OUTCOME_OF.row(conn, {"request_id": request_id, "most": most_bytes})
    return None if row is None else Outcome(*row)


def find_many(
    conn: Connection, request_ids: Sequence[RequestId], most_bytes: int = ANY_SIZE
) -> list[Outcome]:
    """Return the outcomes of the known requests, in no particular order."""
    rows = conn.execute(_OUTCOMES, {"request_ids": request_ids, "most": most_bytes})
    return [Outcome(*row) for row in rows]


def finished_after(
    conn: Connection, cursor: int, most_bytes: int = ANY_SIZE, limit: int = PAGE
) -> list[tuple[int, Outcome]]:
    """Return (results.id, outcome) of requests finished after the cursor, in that order, at most `limit`."""
    rows = _FINISHED.rows(conn, {"cursor": cursor, "most": most_bytes, "count": limit})
    return [(row[0], Outcome(*row[1:])) for row in rows]


def last_result_id(conn: Connection) -> int:
    """Return the cursor behind the newest result, 0 if there is none."""
    return conn.scalar(select(func.max(Result.id))) or 0
