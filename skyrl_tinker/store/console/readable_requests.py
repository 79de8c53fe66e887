"""Passes and samples whose tokens are still stored: results, and with passes their bodies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, case, exists, func, or_, select, union_all

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, OwnerId, RequestKind
from skyrl_tinker.protocol.schemas.base import MAX_INT64
from skyrl_tinker.protocol.schemas.console import ReadableQuery
from skyrl_tinker.store import model_records
from skyrl_tinker.store.console import run_reports
from skyrl_tinker.store.console.traced_requests import MOST
from skyrl_tinker.store.database.rows import AnyRow
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
NEAR = 1000
"""Numbers among which the request before one, and the one behind, are looked for."""
OVERTAKEN = 100
"""Passes of a run beyond a page that are looked at: they may come in another order than by seq_id."""
_BASE_MODEL = func.coalesce(Model.base_model, SamplingSession.base_model)
_FIXED = (AdapterVersion.id == SamplingSession.version_id) & AdapterVersion.inflight.is_(False)
_READABLE = or_(Future.kind == RequestKind.SAMPLE, exists().where(Request.future_id == Future.id))
_STEP = func.coalesce(model_records.steps_at(Future.seq_id), AdapterVersion.steps).label("step")


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """Body and result of a request. `body` None: it is not stored any more.

    `earlier`, `later`: the request before and behind of the same kind, of its model or sampling session.
    `run`, `name`: the owner's run whose weights it used. `step`: how many steps they had taken, with those of
    the run's parents, and the numbers that the script `reported` of that step. None: of base models, and of
    weights that change while they are sampled.
    """

    kind: RequestKind
    base_model: str
    body: bytes | None
    result: bytes
    earlier: str | None
    later: str | None
    run: str | None
    name: str | None
    step: int | None
    reported: Mapping[str, float]


def readable_requests(conn: Connection, owner: OwnerId | None, wanted: ReadableQuery) -> Sequence[AnyRow]:
    """Return a page of the owner's requests that are stored, the newest first.

    Of a run: its passes, and samples from its weights as far as their versions are recorded. Rows have the
    names of ReadableSummary, `id` and `base_model`; `prompt`: a sample's body, None if it is not stored.
    """
    of_kind = Future.kind.in_(KINDS if wanted.kind is None else (RequestKind(wanted.kind),))
    finished = of_kind, Future.status == FutureStatus.DONE
    query = (
        select(
            Future.id,
            Future.request_id,
            Future.kind,
            Future.seq_id,
            func.coalesce(Model.model_id, Future.sampling_session_id).label("origin"),
            Session.display_name.label("name"),
            _BASE_MODEL.label("base_model"),
            _STEP,
            Future.created_at,
            or_(Future.kind == RequestKind.SAMPLE, Request.future_id.is_not(None)).label("readable"),
            case((Future.kind == RequestKind.SAMPLE, Request.body)).label("prompt"),
        )
        .join(Session, Session.session_id == Future.session_id)
        .join(Result, Result.future_id == Future.id)
        .outerjoin(Request, Request.future_id == Future.id)
        .outerjoin(Model, Model.key == Future.model_key)
        .outerjoin(SamplingSession, SamplingSession.sampling_session_id == Future.sampling_session_id)
        .outerjoin(AdapterVersion, _FIXED)
        .where(owned_by(owner), *finished, _among(conn, wanted, owned_by(owner), *finished))
        .order_by(Future.id.desc())
        .limit(wanted.limit)
        .offset(wanted.offset)
    )
    return conn.execute(query).all()


def _among(conn: Connection, wanted: ReadableQuery, *shown: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return SQL: it is one of the newest of all, or of those `shown` of the run, whatever came since."""
    if wanted.run is None:
        return Future.id > (conn.scalar(select(func.max(Future.id))) or 0) - MOST
    passes = (  # along the unique index
        select(Future.id)
        .join(Model, Model.key == Future.model_key)
        .join(Result, Result.future_id == Future.id)
        .join(Session, Session.session_id == Future.session_id)
        .where(Model.model_id == wanted.run, *shown)
        .order_by(Future.seq_id.desc())
        .limit(min(wanted.limit + wanted.offset + OVERTAKEN, MAX_INT64))
        .subquery()
    )
    samples = (  # along the indexes of its weights
        select(Future.id)
        .join(Session, Session.session_id == Future.session_id)
        .join(SamplingSession, SamplingSession.sampling_session_id == Future.sampling_session_id)
        .join(AdapterVersion, AdapterVersion.id == SamplingSession.version_id)
        .join(Model, Model.key == AdapterVersion.model_key)
        .where(Model.model_id == wanted.run, *shown)
        .order_by(Future.id.desc())
        .limit(MOST)
        .subquery()
    )
    return Future.id.in_(union_all(select(passes.c.id), select(samples.c.id)))


def stored_tokens(conn: Connection, owner: OwnerId | None, request_id: str) -> StoredTokens | None:
    """Return the stored parts of an owner's request; None if it is not its own, or purged."""
    place = Future.model_key, Future.sampling_session_id, Future.seq_id
    weights = func.coalesce(Future.model_key, AdapterVersion.model_key), _STEP
    query = (
        select(Future.kind, _BASE_MODEL, Request.body, Result.body, *place, *weights)
        .join(Session, Session.session_id == Future.session_id)
        .join(Result, Result.future_id == Future.id)
        .outerjoin(Request, Request.future_id == Future.id)
        .outerjoin(Model, Model.key == Future.model_key)
        .outerjoin(SamplingSession, SamplingSession.sampling_session_id == Future.sampling_session_id)
        .outerjoin(AdapterVersion, _FIXED)
        .where(Future.request_id == request_id, Future.kind.in_(KINDS), owned_by(owner))
        .where(Future.status == FutureStatus.DONE)
    )
    row = conn.execute(query).one_or_none()
    if row is None:
        return None
    kind, base_model, body, result, model, sampler, seq_id, of_run, step = row
    of = Future.sampling_session_id == sampler if model is None else Future.model_key == model
    same = of, Future.kind == kind, Future.status == FutureStatus.DONE, _READABLE
    near = select(Future.request_id).join(Result, Result.future_id == Future.id).where(*same).limit(1)
    assert seq_id is not None, "passes and samples are numbered"
    before = near.where(Future.seq_id.between(seq_id - NEAR, seq_id - 1)).order_by(Future.seq_id.desc())
    behind = near.where(Future.seq_id.between(seq_id + 1, seq_id + NEAR)).order_by(Future.seq_id)
    ends = conn.scalar(before), conn.scalar(behind)
    named = select(Model.model_id, Session.display_name).join(Session, Session.session_id == Model.session_id)
    own = conn.execute(named.where(Model.key == of_run, owned_by(owner))).one_or_none()
    run, name = own or (None, None)  # a published checkpoint is of others
    reported = {} if run is None or step is None else run_reports.of_step(conn, ModelKey(of_run), step)
    return StoredTokens(kind, base_model, body, result, *ends, run, name, step, reported)


def body_of(conn: Connection, future_id: int) -> bytes:
    """Return the body of a request, which is stored."""
    return conn.execute(select(Request.body).where(Request.future_id == future_id)).scalar_one()
