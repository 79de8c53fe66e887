"""Finished requests of all owners in the order of their results, for the export of traces."""

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import ApiKey, Future, Model, Result, Session


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Request of a model (`run`) or of a sampler. Times are UTC seconds; `category` None: without error.

    `result_id`: the cursor behind it. `owner`: the name of the API key.
    """

    result_id: int
    id: int
    request_id: str
    kind: RequestKind
    seq_id: int | None
    session: str
    owner: str | None
    run: str | None
    sampler: str | None
    created_at: float
    finished_at: float
    category: str | None
    error: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int


_FINISHED = Prepared(
    select(
        Result.id,
        Future.id,
        Future.request_id,
        Future.kind,
        Future.seq_id,
        Session.session_id,
        ApiKey.name,
        Model.model_id,
        Future.sampling_session_id,
        Future.created_at,
        Future.finished_at,
        Future.category,
        Future.error,
        Result.input_tokens,
        Result.cached_tokens,
        Result.output_tokens,
    )
    .join(Future, Future.id == Result.future_id)
    .join(Session, Session.session_id == Future.session_id)
    .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
    .outerjoin(Model, Model.key == Future.model_key)
    .where(Result.id > bindparam("after"))
    .order_by(Result.id)
    .limit(bindparam("most"))
)


def finished_requests(conn: Connection, after: int, limit: int) -> list[FinishedRequest]:
    """Return the oldest requests whose results came after the cursor `after`, at most `limit`."""
    return [FinishedRequest(*row) for row in _FINISHED.rows(conn, {"after": after, "most": limit})]
