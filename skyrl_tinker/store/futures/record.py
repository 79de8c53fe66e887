"""Records of requests: a new future, or the first request of the same key."""

from dataclasses import dataclass, fields
from secrets import token_hex
from time import time_ns

from sqlalchemy import Connection, bindparam, insert, select

from skyrl_tinker.domain.ids import FutureStatus, ModelId, ModelKey, RequestId, RequestKind
from skyrl_tinker.errors import SeqIdReusedError, UserError
from skyrl_tinker.store.database.group_commit import LARGE_BYTES
from skyrl_tinker.store.database.prepared import Gathered, Prepared
from skyrl_tinker.store.database.rows import AnyRow, database_time, values_of
from skyrl_tinker.store.database.tables import Future, Request, Session

MAX_SEQ_ID = 2**63 - 1

FIRST = (Future.request_id, Future.kind, Future.digest, Future.sequence_ids)
"""Columns that tell if an earlier request is the same."""
SESSION = (Session.session_id, Session.finished_at, Session.finish_reason)
_BODY = Gathered(
    Request,
    ("future_id", "body"),
    select(bindparam("future_id", type_=Request.future_id.type), bindparam("body", type_=Request.body.type)),
)
_LARGE_BODY = Prepared(insert(Request), ("future_id", "body"))


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer to a submission; `created` False: the same request came before."""

    request_id: RequestId
    sequence_ids: tuple[str, ...]
    model_id: ModelId | None
    created: bool


@dataclass(frozen=True, slots=True)
class NewFuture:
    """Future to insert."""

    kind: RequestKind
    seq_id: int | None
    digest: bytes
    session_id: str
    model_key: ModelKey | None = None


_GIVEN = [each.name for each in fields(NewFuture)]
_FUTURE = Prepared(
    insert(Future).returning(Future.id), [*_GIVEN, "request_id", "sequence_ids", "status", "created_at"]
)


def new_request_id() -> RequestId:
    """Return milliseconds of the clock and 80 random bits: new ids share pages of their index.

    Of random ids each one writes a page of its own, to the log and from there to the file.
    """
    return RequestId(f"{time_ns() // 1_000_000:012x}{token_hex(10)}")


def insert_future(conn: Connection, new: NewFuture, model_id: ModelId | None) -> tuple[int, Accepted]:
    """Insert a pending future. Returns its id and the answer."""
    request_id = new_request_id()
    pending = {"request_id": request_id, "sequence_ids": (), "status": FutureStatus.PENDING}
    (row,) = _FUTURE.rows(conn, {**values_of(new), **pending, "created_at": database_time(conn)})
    return row.id, Accepted(request_id, (), model_id, created=True)


def insert_body(conn: Connection, future_id: int, body: bytes) -> None:
    """Insert the body of a pending request."""
    put = _BODY if len(body) <= LARGE_BYTES else _LARGE_BODY  # no copy of it among others
    put.send(conn, {"future_id": future_id, "body": body})


def existing_answer(row: AnyRow, model_id: ModelId | None) -> Accepted:
    """Return the answer to the first request of the same key."""
    return Accepted(RequestId(row.request_id), tuple(row.sequence_ids), model_id, created=False)


def check_seq_id(name: str, seq_id: int, lowest: int) -> None:
    """Raise UserError for a seq id out of range."""
    if not lowest <= seq_id <= MAX_SEQ_ID:
        raise UserError(f"{name} must lie between {lowest} and {MAX_SEQ_ID}, found {seq_id}")


def require_same(row: AnyRow, kind: RequestKind, digest: bytes, key: str) -> None:
    """Raise SeqIdReusedError if the first request of this key is another one."""
    if row.kind != kind:
        raise SeqIdReusedError(f"{key} was used for {row.kind}, now for {kind}")
    if row.digest != digest:
        raise SeqIdReusedError(
            f"{key} was used for {row.kind} with another payload "
            f"(digest {row.digest.hex()[:12]} then, {digest.hex()[:12]} now)"
        )
