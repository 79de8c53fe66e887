"""Requests as traces show them: of a session's models and samplers, of the last minutes, and finished ones.

Long lists are read in pages, along unique indexes.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, bindparam, func, or_, select

from skyrl_tinker.domain.ids import FutureStatus, Reach, RequestKind, SessionId
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import ApiKey, Future, Model, Result, SamplingSession, Session
from skyrl_tinker.store.owners import within

MOST = 20_000
"""Requests, of all owners, among which recent ones are: the newest."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """Request of a model (`run`) or of a sampler. Times are UTC seconds; `finished_at` None: pending.

    `name`: that of its session, if it has one.
    """

    id: int
    request_id: str
    kind: RequestKind
    seq_id: int | None
    status: FutureStatus
    created_at: float
    finished_at: float | None
    run: str | None
    sampler: str | None
    session: str
    name: str | None


@dataclass(frozen=True, slots=True)
class FinishedRequest(TracedRequest):
    """Request that has ended. `category` None: without error.

    `result_id`: the cursor behind it. `owner`: the name of the API key.
    """

    finished_at: float
    result_id: int
    owner: str | None
    category: str | None
    error: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Track:
    """Model or sampler, by its number in the session, and the condition of its requests."""

    seq_id: int
    label: str
    requests: ColumnElement[bool]


_COLUMNS = (
    *(Future.id, Future.request_id, Future.kind, Future.seq_id, Future.status),
    *(Future.created_at, Future.finished_at, Model.model_id, Future.sampling_session_id),
    *(Session.session_id, Session.display_name),
)
_REQUESTS = (
    select(*_COLUMNS)
    .join(Session, Session.session_id == Future.session_id)
    .outerjoin(Model, Model.key == Future.model_key)
)
_FINISHED = Prepared(
    select(
        *_COLUMNS,
        *(Result.id, ApiKey.name, Future.category, Future.error),
        *(Result.input_tokens, Result.cached_tokens, Result.output_tokens),
    )
    .select_from(Result)
    .join(Future, Future.id == Result.future_id)
    .join(Session, Session.session_id == Future.session_id)
    .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
    .outerjoin(Model, Model.key == Future.model_key)
    .where(Result.id > bindparam("after"))
    .order_by(Result.id)
    .limit(bindparam("most"))
)


def finished_requests(conn: Connection, after: int, limit: int) -> list[FinishedRequest]:
    """Return the oldest requests of all owners whose results came after the cursor `after`."""
    return [FinishedRequest(*row) for row in _FINISHED.rows(conn, {"after": after, "most": limit})]


def recent_requests(conn: Connection, reach: Reach, since: float) -> list[TracedRequest]:
    """Return the requests that the caller sees and that were not finished at `since`, oldest first."""
    newest = conn.scalar(select(func.max(Future.id))) or 0
    lately = Future.id > newest - MOST, or_(Future.finished_at.is_(None), Future.finished_at >= since)
    query = _REQUESTS.where(*lately, within(reach)).order_by(Future.id)
    return [TracedRequest(*row) for row in conn.execute(query)]


def list_models(conn: Connection, session: SessionId, after: int, limit: int) -> list[Track]:
    """Return the models of a session with numbers above `after`, in order."""
    number = Model.model_seq_id
    query = select(number, Model.key, Model.model_id).where(Model.session_id == session, number > after)
    rows = conn.execute(query.order_by(number).limit(limit))
    return [Track(seq_id, f"model {model_id}", Future.model_key == key) for seq_id, key, model_id in rows]


def list_samplers(conn: Connection, session: SessionId, after: int, limit: int) -> list[Track]:
    """Return the samplers of a session with numbers above `after`, in order."""
    number, key = SamplingSession.sampling_session_seq_id, SamplingSession.sampling_session_id
    query = select(number, key, SamplingSession.model_path)
    query = query.where(SamplingSession.session_id == session, number > after)
    rows = conn.execute(query.order_by(number).limit(limit))
    return [
        Track(row[0], f"sampler {row[2] or row[1]}", Future.sampling_session_id == row[1]) for row in rows
    ]


def requests_after(
    conn: Connection, track: ColumnElement[bool], after: int, limit: int
) -> list[TracedRequest]:
    """Return the requests of a track with a seq_id above `after`, in order."""
    query = _REQUESTS.where(track, Future.seq_id > after).order_by(Future.seq_id).limit(limit)
    return [TracedRequest(*row) for row in conn.execute(query)]
