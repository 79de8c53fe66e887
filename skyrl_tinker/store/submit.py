"""Accepting requests. Each `submit_*` is one write: it finds the first request of the same key or writes the
new one, so that duplicates, however they race, get the same answer.
"""

import time
from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy import and_, bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.errors import NotFoundError, SeqIdReusedError, UserError
from skyrl_tinker.store import custom_losses, finish, models, sessions
from skyrl_tinker.store.custom_losses import NewLoss
from skyrl_tinker.store.models import NewModel
from skyrl_tinker.store.rows import AnyRow, insert_id
from skyrl_tinker.store.tables import Future, Model, Request, SamplingSession, Session, UploadedLoss
from skyrl_tinker.wire.ids import (
    FutureStatus,
    ModelId,
    ModelKey,
    ModelState,
    RequestId,
    RequestKind,
    SamplingSessionId,
    sequence_ids,
)
from skyrl_tinker.wire.values import Failure

MAX_SEQ_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """`created` false: the same request came before, and this is its answer."""

    request_id: RequestId
    sequence_ids: tuple[str, ...]
    model_id: ModelId | None
    created: bool


@dataclass(frozen=True, slots=True)
class _New:
    """A future to be written. At most one of `model_key` and `sampling_session_id` is set."""

    kind: RequestKind
    seq_id: int
    digest: bytes
    session_id: str
    model_key: ModelKey | None = None
    sampling_session_id: SamplingSessionId | None = None
    sequences: int = 0


# Statements of the hot path are built once: making one costs more than running it.
_FIRST = (Future.request_id, Future.kind, Future.digest, Future.sequence_ids)
_SESSION = (Session.session_id, Session.finished_at, Session.finish_reason)
_OF_CREATE = select(*_FIRST).where(Future.model_key == bindparam("model_key"), Future.seq_id == 0)
_OF_MODEL = (
    select(Model.key, *_SESSION, *_FIRST)
    .join(Session, Session.session_id == Model.session_id)
    .outerjoin(Future, and_(Future.model_key == Model.key, Future.seq_id == bindparam("seq_id")))
    .where(Model.model_id == bindparam("model_id"))
)
_OF_SAMPLER = (
    select(*_SESSION, *_FIRST)
    .select_from(SamplingSession)
    .join(Session, Session.session_id == SamplingSession.session_id)
    .outerjoin(
        Future,
        and_(
            Future.sampling_session_id == SamplingSession.sampling_session_id,
            Future.seq_id == bindparam("seq_id"),
        ),
    )
    .where(SamplingSession.sampling_session_id == bindparam("sampling_session_id"))
)
_OF_LOSS = (
    select(*_FIRST)
    .join(UploadedLoss, UploadedLoss.future_id == Future.id)
    .where(UploadedLoss.loss_id == bindparam("loss_id"))
)
_BUMP = update(Model).where(Model.key == bindparam("model_key")).values(last_request_at=bindparam("now"))
_FUTURE = insert(Future)
_BODY = insert(Request)


async def submit_create(
    conn: AsyncConnection,
    kind: RequestKind,
    model: NewModel,
    *,
    body: bytes,
    digest: bytes,
    failure: Failure | None = None,
) -> Accepted:
    """A model row and its future (seq_id 0). With `failure` both are born failed.

    Raises SeqIdReusedError, NotFoundError (no session), GoneError (session finished).
    """
    _check_seq_id("model_seq_id", model.model_seq_id, lowest=0)
    first = await models.by_id(conn, model.model_id)
    if first is not None:
        row = (await conn.execute(_OF_CREATE, {"model_key": first.key})).one()
        _require_same(row, kind, digest, f"model_seq_id {model.model_seq_id} of session {model.session_id}")
        return _again(row, model.model_id)
    await sessions.require_live(conn, model.session_id)
    state = ModelState.FAILED if failure else ModelState.CREATING
    key = await models.add(conn, model, state, failure.message if failure else None)
    new = _New(kind, 0, digest, model.session_id, model_key=key)
    return await _record(conn, new, body, failure, model.model_id)


async def submit_training(
    conn: AsyncConnection,
    kind: RequestKind,
    model_id: ModelId,
    seq_id: int,
    *,
    body: bytes,
    digest: bytes,
    failure: Failure | None = None,
) -> Accepted:
    """A request of a model's lane. With `failure` it is finished at once, and its seq_id is consumed.

    Raises SeqIdReusedError, NotFoundError (no model), GoneError (session finished).
    """
    _check_seq_id("seq_id", seq_id, lowest=1)
    row = (await conn.execute(_OF_MODEL, {"model_id": model_id, "seq_id": seq_id})).one_or_none()
    if row is None:
        raise NotFoundError(f"no model {model_id}")
    if row.request_id is not None:
        _require_same(row, kind, digest, f"seq_id {seq_id} of model {model_id}")
        return _again(row, model_id)
    sessions.check_live(row)
    await conn.execute(_BUMP, {"model_key": row.key, "now": time.time()})
    new = _New(kind, seq_id, digest, row.session_id, model_key=row.key)
    return await _record(conn, new, body, failure, model_id)


async def submit_sample(
    conn: AsyncConnection,
    sampling_session_id: SamplingSessionId,
    seq_id: int,
    *,
    body: bytes,
    digest: bytes,
    num_samples: int,
) -> Accepted:
    """A sample; `sequence_ids` has one id per sequence to come.

    Raises SeqIdReusedError, NotFoundError (no sampling session), GoneError (session finished).
    """
    _check_seq_id("seq_id", seq_id, lowest=0)
    key = {"sampling_session_id": sampling_session_id, "seq_id": seq_id}
    row = (await conn.execute(_OF_SAMPLER, key)).one_or_none()
    if row is None:
        raise NotFoundError(f"no sampling session {sampling_session_id}")
    kind = RequestKind.SAMPLE
    if row.request_id is not None:
        _require_same(row, kind, digest, f"seq_id {seq_id} of sampling session {sampling_session_id}")
        return _again(row, None)
    sessions.check_live(row)
    new = _New(
        kind,
        seq_id,
        digest,
        row.session_id,
        sampling_session_id=sampling_session_id,
        sequences=num_samples,
    )
    return await _record(conn, new, body, None, None)


async def submit_custom_loss(
    conn: AsyncConnection,
    loss: NewLoss,
    *,
    digest: bytes,
    result: bytes,
    failure: Failure | None = None,
) -> Accepted:
    """An uploaded loss and its future, which is born finished: with `result` (JSON), or as failed.

    Raises SeqIdReusedError, NotFoundError (no session), GoneError (session finished), UserError (too many).
    """
    _check_seq_id("custom_loss_seq_id", loss.seq_id, lowest=0)
    row = (await conn.execute(_OF_LOSS, {"loss_id": loss.loss_id})).one_or_none()
    kind = RequestKind.CREATE_CUSTOM_LOSS
    if row is not None:
        _require_same(row, kind, digest, f"custom_loss_seq_id {loss.seq_id} of session {loss.session_id}")
        return _again(row, None)
    await sessions.require_live(conn, loss.session_id)
    await custom_losses.require_room(conn, loss.session_id)
    future_id, accepted = await _journal(conn, _New(kind, loss.seq_id, digest, loss.session_id), None)
    await custom_losses.add(conn, loss, future_id)
    if failure is not None:
        await finish.fail(conn, future_id, failure)
    else:
        await finish.succeed(conn, future_id, finish.JSON_TYPE, result)
    return accepted


def _check_seq_id(name: str, seq_id: int, lowest: int) -> None:
    if not lowest <= seq_id <= MAX_SEQ_ID:
        raise UserError(f"{name} must lie between {lowest} and {MAX_SEQ_ID}, found {seq_id}")


def _require_same(row: AnyRow, kind: RequestKind, digest: bytes, key: str) -> None:
    if row.kind != kind:
        raise SeqIdReusedError(f"{key} was used for {row.kind}, now for {kind}")
    if row.digest != digest:
        raise SeqIdReusedError(
            f"{key} was used for {row.kind} with another payload "
            f"(digest {row.digest.hex()[:12]} then, {digest.hex()[:12]} now)"
        )


def _again(row: AnyRow, model_id: ModelId | None) -> Accepted:
    return Accepted(RequestId(row.request_id), tuple(row.sequence_ids), model_id, created=False)


async def _record(
    conn: AsyncConnection, new: _New, body: bytes, failure: Failure | None, model_id: ModelId | None
) -> Accepted:
    """Write the future and either its body or its failure."""
    future_id, accepted = await _journal(conn, new, model_id)
    if failure is not None:
        await finish.fail(conn, future_id, failure)
    else:
        await conn.execute(_BODY, {"future_id": future_id, "body": body})
    return accepted


async def _journal(conn: AsyncConnection, new: _New, model_id: ModelId | None) -> tuple[int, Accepted]:
    """Write the future, pending. Returns its key, too."""
    request_id = RequestId(uuid4().hex)
    sequences = sequence_ids(request_id, new.sequences)
    future_id = await insert_id(
        conn,
        _FUTURE,
        {
            "request_id": request_id,
            "kind": new.kind,
            "session_id": new.session_id,
            "model_key": new.model_key,
            "sampling_session_id": new.sampling_session_id,
            "seq_id": new.seq_id,
            "digest": new.digest,
            "sequence_ids": sequences,
            "status": FutureStatus.PENDING,
            "created_at": time.time(),
        },
    )
    return future_id, Accepted(request_id, sequences, model_id, created=True)
