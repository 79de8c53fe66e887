"""Submission of training requests and losses.

Each `submit_*` is one write: it finds the first request of its key or inserts the new one, so that racing
duplicates get the same answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, literal, select
from sqlalchemy.orm import aliased

from skyrl_tinker.domain.ids import FutureStatus, ModelId, ModelState, OwnerId, RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.errors import KeyLimitError, NotFoundError, OverloadedError, SeqIdReusedError
from skyrl_tinker.store import custom_losses, model_records, owners, session_records
from skyrl_tinker.store.custom_losses import NewLoss
from skyrl_tinker.store.database.group_commit import Later
from skyrl_tinker.store.database.prepared import Gathered, Prepared
from skyrl_tinker.store.database.rows import AnyRow, database_time
from skyrl_tinker.store.database.tables import Future, Model, Session, UploadedLoss
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.futures.record import (
    FIRST,
    SESSION,
    Accepted,
    NewFuture,
    check_seq_id,
    existing_answer,
    insert_body,
    insert_future,
    new_request_id,
    require_same,
)
from skyrl_tinker.store.model_records import NewModel
from skyrl_tinker.store.owners import OWNED

_FIRST_CREATION = select(*FIRST).where(Future.model_key == bindparam("model_key"), Future.seq_id == 0)
_OTHER = aliased(Future)
_SAME_NUMBER = _OTHER.seq_id == bindparam("seq_id")
_RAN_LATER = _OTHER.seq_id > bindparam("seq_id"), _OTHER.unit.is_not(None)
"""A later request ran, so that this one, if there is no record of it, had one."""


def _first_id(*where: ColumnElement[bool]) -> ColumnElement[int | None]:
    """Return SQL: the id of a request of the model, along its index.

    EXISTS would be a join to PostgreSQL, which reads all of the table as long as it knows it as a small one.
    """
    query = select(_OTHER.id).where(_OTHER.model_key == Model.key, *where)
    return query.order_by(_OTHER.model_key, _OTHER.seq_id).limit(1).scalar_subquery()


_MODEL_AND_FIRST = Prepared(
    select(Model.key, *SESSION, *FIRST, _first_id(*_RAN_LATER).label("passed"))
    .join(Session, Session.session_id == Model.session_id)
    .outerjoin(Future, and_(Future.model_key == Model.key, Future.seq_id == bindparam("seq_id")))
    .where(Model.model_id == bindparam("model_id"), OWNED)
)
_FIRST_UPLOAD = (
    select(*FIRST)
    .join(UploadedLoss, UploadedLoss.future_id == Future.id)
    .where(UploadedLoss.loss_id == bindparam("loss_id"))
)
_VALUES: dict[Any, Any] = {
    Future.request_id: bindparam("request_id", type_=Future.request_id.type),
    Future.kind: bindparam("kind", type_=Future.kind.type),
    Future.session_id: Session.session_id,
    Future.model_key: Model.key,
    Future.seq_id: bindparam("seq_id", type_=Future.seq_id.type),
    Future.digest: bindparam("digest", type_=Future.digest.type),
    Future.sequence_ids: literal([], Future.sequence_ids.type),
    Future.status: literal(FutureStatus.PENDING, Future.status.type),
    Future.created_at: bindparam("now", type_=Future.created_at.type),
}
_INSERT = Gathered(
    Future,
    [column.key for column in _VALUES],
    select(*_VALUES.values())
    .select_from(Model)
    .join(Session, Session.session_id == Model.session_id)
    .where(Model.model_id == bindparam("model_id"), OWNED, Session.finished_at.is_(None))
    .where(_first_id(_SAME_NUMBER).is_(None), _first_id(*_RAN_LATER).is_(None)),
    key="request_id",
)
"""Of a request that nothing speaks against; it inserts none else."""


@dataclass(frozen=True, slots=True)
class Creation:
    """Model for the engine to create, or with `failure` one that is stored as failed."""

    kind: RequestKind
    model: NewModel
    digest: bytes
    body: bytes = b""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """Checked request of a model. With `failure`, `body` is empty and never read."""

    kind: RequestKind
    model_id: ModelId
    seq_id: int
    digest: bytes
    body: bytes
    failure: Failure | None = None


Admit = Callable[[Connection], None]
"""Check of a new request, which is made only if it was not submitted before."""


def submit_create(
    conn: Connection, new: Creation, *, owner: OwnerId | None, admit: Admit | None = None
) -> Accepted:
    """Submit a model and its future (seq_id 0). With a failure both are stored as failed.

    Raises SeqIdReusedError, NotFoundError (no session), GoneError (session finished), and as `admit`.
    """
    model, failure = new.model, new.failure
    check_seq_id("model_seq_id", model.model_seq_id, lowest=0)
    owners.require_session(conn, owner, model.session_id)
    first = model_records.by_id(conn, model.model_id)
    if first is not None:
        row = conn.execute(_FIRST_CREATION, {"model_key": first.key}).one()
        where = f"model_seq_id {model.model_seq_id} of session {model.session_id}"
        require_same(row, new.kind, new.digest, where)
        return existing_answer(row, model.model_id)
    session_records.require_live(conn, model.session_id)
    if failure is None and admit is not None:
        admit(conn)
    state = ModelState.FAILED if failure else ModelState.CREATING
    key = model_records.add(conn, model, state, failure.message if failure else None)
    future = NewFuture(new.kind, 0, new.digest, model.session_id, model_key=key)
    return _insert(conn, future, new.body, failure, model.model_id)


def submit_training(
    conn: Connection,
    new: Submission,
    *,
    owner: OwnerId | None,
    admit: Admit | None = None,
    refusal: OverloadedError | None = None,
) -> Later[Accepted]:
    """Submit a model's request. With a failure it is stored as failed, and its seq_id is consumed.

    A KeyLimitError of `admit` is such a failure. One that came too late, when its number had been failed as
    missing, gets that failure. `refusal` is raised for a new request, but not for one that
    others of the model wait for.

    Raises SeqIdReusedError, NotFoundError (no model), GoneError (session finished).
    """
    check_seq_id("seq_id", new.seq_id, lowest=1)
    key = {"model_id": new.model_id, "seq_id": new.seq_id, "owner": owner}
    request_id = new_request_id()
    sent = None
    if new.failure is None and admit is None and refusal is None:
        values = {"request_id": request_id, "kind": new.kind, "digest": new.digest}
        sent = _INSERT.send(conn, {**key, **values, "now": database_time(conn)})

    def answer() -> Accepted:
        if sent is None or (row := sent.row()) is None:
            return _submit_checked(conn, new, _MODEL_AND_FIRST.row(conn, key), admit, refusal)
        insert_body(conn, row.id, new.body)
        return Accepted(request_id, (), new.model_id, created=True)

    return Later(answer)


def _submit_checked(
    conn: Connection,
    new: Submission,
    row: AnyRow | None,
    admit: Admit | None,
    refusal: OverloadedError | None,
) -> Accepted:
    """Submit a request of which more is to be known, or say why it cannot be; `row`: of _MODEL_AND_FIRST."""
    model_id, seq_id, failure = new.model_id, new.seq_id, new.failure
    if row is None:
        raise NotFoundError(f"no model {model_id}")
    if row.request_id is not None:
        if row.kind is not RequestKind.MISSING:
            require_same(row, new.kind, new.digest, f"seq_id {seq_id} of model {model_id}")
        return existing_answer(row, model_id)
    if row.passed is not None:
        raise SeqIdReusedError(f"seq_id {seq_id} of model {model_id} was used, and its record is gone by now")
    session_records.check_live(row)
    if refusal is not None and not _awaited(conn, row.key, seq_id):
        raise refusal
    try:
        if admit is not None:
            admit(conn)
    except KeyLimitError as error:
        failure = failure or Failure(str(error), error.category)
    future = NewFuture(new.kind, seq_id, new.digest, row.session_id, model_key=row.key)
    return _insert(conn, future, new.body, failure, model_id)


def submit_custom_loss(conn: Connection, new: NewLoss, owner: OwnerId | None, result: bytes) -> Accepted:
    """Submit a loss and its finished future, with `result` (JSON) unless it was refused.

    Raises SeqIdReusedError, NotFoundError (no session), GoneError (session finished), UserError (too many).
    """
    check_seq_id("custom_loss_seq_id", new.seq_id, lowest=0)
    owners.require_session(conn, owner, new.session_id)
    row = conn.execute(_FIRST_UPLOAD, {"loss_id": new.loss_id}).one_or_none()
    kind = RequestKind.CREATE_CUSTOM_LOSS
    if row is not None:
        require_same(row, kind, new.digest, f"custom_loss_seq_id {new.seq_id} of session {new.session_id}")
        return existing_answer(row, None)
    session_records.require_live(conn, new.session_id)
    custom_losses.require_capacity(conn, new.session_id)
    future_id, accepted = insert_future(conn, NewFuture(kind, new.seq_id, new.digest, new.session_id), None)
    custom_losses.add(conn, new, future_id)
    if isinstance(new.loss, Failure):
        finish.fail(conn, future_id, new.loss)
    else:
        finish.succeed(conn, future_id, finish.JSON_TYPE, result)
    return accepted


def _awaited(conn: Connection, model_key: int, seq_id: int) -> bool:
    """Return whether later requests of the model are there: refused for long, this one would hold them up."""
    later = select(Future.id).where(Future.model_key == model_key, Future.seq_id > seq_id).limit(1)
    return conn.scalar(later) is not None


def _insert(
    conn: Connection, new: NewFuture, body: bytes, failure: Failure | None, model_id: ModelId | None
) -> Accepted:
    """Insert the future and either its body or its failure."""
    future_id, accepted = insert_future(conn, new, model_id)
    if failure is not None:
        finish.fail(conn, future_id, failure)
    else:
        insert_body(conn, future_id, body)
    return accepted
