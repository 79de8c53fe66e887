"""Queue position of a request, and the requests that cancel a sample or unload a model.

Both enter the journal behind their subject, and so reach the engine after it.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, literal, select

from skyrl_tinker.domain.ids import FutureStatus, ModelId, Reach, RequestId, RequestKind
from skyrl_tinker.errors import UserError, found
from skyrl_tinker.store import session_records
from skyrl_tinker.store.database.tables import Future, Model, SamplingSession, Session
from skyrl_tinker.store.futures.record import (
    SESSION,
    Accepted,
    NewFuture,
    existing_answer,
    insert_body,
    insert_future,
)
from skyrl_tinker.store.owners import within


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Position of a request in the journal, by `future_id`.

    `model_key`, `seq_id`: if it is for training. `base_model`: of a sample.
    """

    future_id: int
    kind: RequestKind
    session_id: str | None
    model_key: int | None
    seq_id: int | None
    base_model: str | None = None


POSITION = (
    *(Future.id, Future.kind, Future.session_id, Future.model_key, Future.seq_id),
    SamplingSession.base_model,
)
"""Columns of a QueuePosition."""
OF_SAMPLE = SamplingSession.sampling_session_id == Future.sampling_session_id
"""Condition of the outer join of POSITION."""
_POSITION = (
    select(*POSITION)
    .outerjoin(SamplingSession, OF_SAMPLE)
    .where(Future.request_id == bindparam("request_id"))
)
_TARGET = (
    select(Future.id, Future.kind, Future.status, Future.session_id)
    .join(Session, Session.session_id == Future.session_id)
    .where(Future.request_id == bindparam("request_id"))
)
_MODEL = (
    select(Model.key, *SESSION)
    .join(Session, Session.session_id == Model.session_id)
    .where(Model.model_id == bindparam("model_id"))
)
_UNLOADING = select(Future.request_id, Future.sequence_ids).where(
    Future.model_key == bindparam("model_key"),
    Future.seq_id.is_(None),
    Future.kind == literal(RequestKind.UNLOAD_MODEL, Future.kind.type),
)


def queue_position(conn: Connection, request_id: RequestId) -> QueuePosition | None:
    """Return the position of a request, None if it is unknown."""
    row = conn.execute(_POSITION, {"request_id": request_id}).one_or_none()
    return None if row is None else QueuePosition(*row)


def cancel_sample(conn: Connection, reach: Reach, request_id: RequestId) -> bool:
    """Submit the cancellation of a sample. Returns False if the sample has finished already.

    Raises NotFoundError, and UserError for another kind of request.
    """
    target = conn.execute(_TARGET.where(within(reach)), {"request_id": request_id}).one_or_none()
    row = found(target, f"no future {request_id!r} on this server")
    if row.kind is not RequestKind.SAMPLE:
        raise UserError(
            f"request_id: found a {row.kind}, expected a sample: "
            "training requests cannot be cancelled, since later ones depend on them"
        )
    if row.status is not FutureStatus.PENDING:
        return False
    new = NewFuture(RequestKind.CANCEL_SAMPLE, None, b"", row.session_id)
    future_id, _ = insert_future(conn, new, None)
    insert_body(conn, future_id, str(row.id).encode())
    return True


def submit_unload(conn: Connection, reach: Reach, model_id: ModelId) -> Accepted:
    """Submit the unloading of a model behind all its requests; a repeated one gets the first answer.

    Raises NotFoundError (no model), GoneError (session finished).
    """
    model = conn.execute(_MODEL.where(within(reach)), {"model_id": model_id}).one_or_none()
    row = found(model, f"no model {model_id}")
    first = conn.execute(_UNLOADING, {"model_key": row.key}).first()
    if first is not None:
        return existing_answer(first, model_id)
    session_records.check_live(row)
    new = NewFuture(RequestKind.UNLOAD_MODEL, None, b"", row.session_id, model_key=row.key)
    future_id, accepted = insert_future(conn, new, model_id)
    insert_body(conn, future_id, b"")
    return accepted
