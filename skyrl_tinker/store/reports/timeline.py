"""Timeline of a session's requests: by model and sampler, in pages, along unique indexes."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from skyrl_tinker.domain.ids import FutureStatus, RequestKind, SessionId
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.database.tables import Future, Model, SamplingSession


@dataclass(frozen=True, slots=True)
class Track:
    """Track of one model or sampler, by its key."""

    label: str
    model_key: int | None = None
    sampling_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """One request. Times are seconds since the epoch; `finished_at` None: pending."""

    id: int
    request_id: str
    kind: RequestKind
    seq_id: int
    status: FutureStatus
    created_at: float
    finished_at: float | None


def list_models(conn: Connection, session: SessionId, after: int, limit: int) -> list[tuple[int, Track]]:
    """Return tracks of models with their numbers in the session, above `after`."""
    number = Model.model_seq_id
    query = (
        select(number, Model.key, Model.model_id)
        .where(Model.session_id == session, number > after)
        .order_by(number)
        .limit(limit)
    )
    rows = conn.execute(query)
    return [(row[0], Track(f"model {row.model_id}", model_key=row.key)) for row in rows]


def list_samplers(conn: Connection, session: SessionId, after: int, limit: int) -> list[tuple[int, Track]]:
    """Return tracks of samplers with their numbers in the session, above `after`."""
    number, key = SamplingSession.sampling_session_seq_id, SamplingSession.sampling_session_id
    query = (
        select(number, key, SamplingSession.model_path)
        .where(SamplingSession.session_id == session, number > after)
        .order_by(number)
        .limit(limit)
    )
    rows = conn.execute(query)
    return [
        (row[0], Track(f"sampler {row.model_path or row[1]}", sampling_session_id=row[1])) for row in rows
    ]


def list_slices(conn: Connection, track: Track, after: int, limit: int) -> list[Slice]:
    """Return the requests of a track by seq_id, above `after`."""
    if track.model_key is not None:
        of_track = Future.model_key == track.model_key
    else:
        of_track = Future.sampling_session_id == track.sampling_session_id
    rows: Iterable[AnyRow] = conn.execute(
        select(
            Future.id,
            Future.request_id,
            Future.kind,
            Future.seq_id,
            Future.status,
            Future.created_at,
            Future.finished_at,
        )
        .where(of_track, Future.seq_id > after)
        .order_by(Future.seq_id)
        .limit(limit)
    )
    return [Slice(*row) for row in rows]
