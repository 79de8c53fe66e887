"""Passes and samples whose tokens are still stored: results, and with passes their bodies."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, exists, func, or_, select, true

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, RequestKind
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.console import ReadableQuery, ReadableSummary
from skyrl_tinker.store.console.traced_requests import MOST
from skyrl_tinker.store.database.tables import (
    AdapterVersion,
    Future,
    Model,
    Request,
    Result,
    SamplingSession,
    Session,
)
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
    conn: Connection, owner: OwnerId | None, wanted: ReadableQuery
) -> list[ReadableSummary]:
    """Return a page of the owner's requests that are stored, the newest first.

    Of a run: its passes, and samples from its weights as far as their versions are recorded.
    """
    newest = conn.scalar(select(func.max(Future.id))) or 0
    kinds = KINDS if wanted.kind is None else (RequestKind(wanted.kind),)
    has_body = or_(Future.kind == RequestKind.SAMPLE, exists().where(Request.future_id == Future.id))
    query = (
        select(
            Future.request_id,
            Future.kind,
            Future.seq_id,
            func.coalesce(Model.model_id, Future.sampling_session_id).label("origin"),
            Future.created_at,
            has_body.label("readable"),
        )
        .join(Session, Session.session_id == Future.session_id)
        .join(Result, Result.future_id == Future.id)
        .outerjoin(Model, Model.key == Future.model_key)
        .where(Future.id > newest - MOST, Future.kind.in_(kinds), Future.status == FutureStatus.DONE)
        .where(owned_by(owner), true() if wanted.run is None else _of_run(wanted.run))
        .order_by(Future.id.desc())
        .limit(wanted.limit)
        .offset(wanted.offset)
    )
    return [
        ReadableSummary(**{**row._mapping, "created_at": utc(row.created_at)}) for row in conn.execute(query)
    ]


def _of_run(run: str) -> ColumnElement[bool]:
    of_weights = (
        select(SamplingSession.sampling_session_id)
        .join(AdapterVersion, AdapterVersion.id == SamplingSession.version_id)
        .join(Model, Model.key == AdapterVersion.model_key)
        .where(Model.model_id == run)
    )
    return or_(Model.model_id == run, Future.sampling_session_id.in_(of_weights))


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
