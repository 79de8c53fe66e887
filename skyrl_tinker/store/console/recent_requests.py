"""Requests of the last minutes, for a trace."""

from dataclasses import dataclass

from sqlalchemy import Connection, func, or_, select

from skyrl_tinker.domain.ids import FutureStatus, Reach, RequestKind
from skyrl_tinker.store.database.tables import Future, Model, Session
from skyrl_tinker.store.owners import within

MOST = 20_000
"""Requests, of all owners, that are looked at: the newest."""


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """Request of a model (`run`) or of a sampler. Times are UTC seconds; `finished_at` None: pending."""

    id: int
    request_id: str
    kind: RequestKind
    seq_id: int | None
    status: FutureStatus
    created_at: float
    finished_at: float | None
    run: str | None
    sampler: str | None


def recent_requests(conn: Connection, reach: Reach, since: float) -> list[RecentRequest]:
    """Return the requests that the caller sees and that were not finished at `since`, oldest first."""
    newest = conn.scalar(select(func.max(Future.id))) or 0
    query = (
        select(
            Future.id,
            Future.request_id,
            Future.kind,
            Future.seq_id,
            Future.status,
            Future.created_at,
            Future.finished_at,
            Model.model_id,
            Future.sampling_session_id,
        )
        .join(Session, Session.session_id == Future.session_id)
        .outerjoin(Model, Model.key == Future.model_key)
        .where(Future.id > newest - MOST, or_(Future.finished_at.is_(None), Future.finished_at >= since))
        .where(within(reach))
        .order_by(Future.id)
    )
    return [RecentRequest(*row) for row in conn.execute(query)]
