"""Passes and samples whose tokens are still stored: results, and with passes their bodies."""

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, RequestKind
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.console import ReadableSummary
from skyrl_tinker.store.console.traced_requests import MOST
from skyrl_tinker.store.database.tables import Future, Model, Request, Result, SamplingSession, Session
from skyrl_tinker.store.owners import owned_by

KINDS = (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD, RequestKind.SAMPLE)


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """Result of a request and, of a pass, its body, None once a snapshot holds its effect."""

    kind: RequestKind
    base_model: str
    body: bytes | None
    result: bytes


def readable_requests(
    conn: Connection, owner: OwnerId | None, limit: int, offset: int
) -> list[ReadableSummary]:
    """Return a page of the owner's requests that are stored, the newest first."""
    newest = conn.scalar(select(func.max(Future.id))) or 0
    query = (
        select(
            Future.request_id,
            Future.kind,
            Future.seq_id,
            func.coalesce(Model.model_id, Future.sampling_session_id).label("origin"),
            Future.created_at,
        )
        .join(Session, Session.session_id == Future.session_id)
        .join(Result, Result.future_id == Future.id)
        .outerjoin(Model, Model.key == Future.model_key)
        .where(Future.id > newest - MOST, Future.kind.in_(KINDS), Future.status == FutureStatus.DONE)
        .where(owned_by(owner))
        .order_by(Future.id.desc())
        .limit(limit)
        .offset(offset)
    )
    return [
        ReadableSummary(**{**row._mapping, "created_at": utc(row.created_at)}) for row in conn.execute(query)
    ]


def stored_tokens(conn: Connection, owner: OwnerId | None, request_id: str) -> StoredTokens | None:
    """Return the stored parts of an owner's request; None if it is not its own, or purged."""
    base_model = func.coalesce(Model.base_model, SamplingSession.base_model)
    query = (
        select(Future.kind, base_model, Request.body, Result.body)
        .join(Session, Session.session_id == Future.session_id)
        .join(Result, Result.future_id == Future.id)
        .outerjoin(Request, Request.future_id == Future.id)
        .outerjoin(Model, Model.key == Future.model_key)
        .outerjoin(SamplingSession, SamplingSession.sampling_session_id == Future.sampling_session_id)
        .where(Future.request_id == request_id, Future.kind.in_(KINDS), owned_by(owner))
        .where(Future.status == FutureStatus.DONE)
    )
    row = conn.execute(query).one_or_none()
    return None if row is None else StoredTokens(*row)
