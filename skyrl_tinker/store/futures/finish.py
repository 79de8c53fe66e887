"""End of futures: once, with bytes that stay fetchable. Numbers that no request came for end as failed."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from skyrl_tinker.domain.ids import Effect, FutureStatus, ModelKey, ModelState, RequestKind
from skyrl_tinker.domain.values import Failure, Usage
from skyrl_tinker.store.database.abstract_database import after_commit
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import database_time, values_of
from skyrl_tinker.store.database.tables import Future, Model, Request, Result
from skyrl_tinker.store.futures.record import NewFuture, insert_future

JSON_TYPE = "application/json"
NO_USAGE = Usage()
_log = logging.getLogger(__name__)

_ENDED = "status", "finished_at", "error", "category"
_RAN = "unit", "effect", "row_budget"
_LIVE = (ModelState.CREATING, ModelState.READY)


def _ending(*columns: str) -> Prepared:
    """Return the statement that finishes a pending future, which it returns."""
    pending = Future.id == bindparam("future_id"), Future.status == FutureStatus.PENDING
    values: dict[str, Any] = {name: bindparam(name) for name in columns}
    return Prepared(update(Future).where(*pending).values(values).returning(Future.id))


_END, _END_RAN = _ending(*_ENDED), _ending(*_ENDED, *_RAN)
_RECORD = Prepared(
    update(Future)
    .where(Future.id == bindparam("future_id"))
    .values({name: bindparam(name) for name in _RAN})
)
_RESULT = Prepared(
    insert(Result), ("future_id", "content_type", "body", "input_tokens", "cached_tokens", "output_tokens")
)
_DROP_BODY = Prepared(delete(Request).where(Request.future_id == bindparam("future_id")))


@dataclass(frozen=True, slots=True)
class Ran:
    """Run of a training request, in number `unit`, and in rows of `row_budget` tokens if it is a pass."""

    unit: int
    effect: Effect | None = None
    row_budget: int | None = None


NOTHING_RAN: Mapping[int, Ran] = MappingProxyType({})


def record(conn: Connection, future_id: int, ran: Ran) -> None:
    """Record that a request ran, whether or not it has its result already."""
    _RECORD.send(conn, {"future_id": future_id, **values_of(ran)})


def succeed(
    conn: Connection, future_id: int, content_type: str, body: bytes, usage: Usage = NO_USAGE
) -> None:
    """Finish with the bytes that the client gets. Does nothing if the future has finished already."""
    succeed_all(conn, {future_id: (content_type, body, usage)})


def succeed_all(
    conn: Connection,
    results: Mapping[int, tuple[str, bytes, Usage]],
    kept: Collection[int] = (),
    ran: Mapping[int, Ran] = NOTHING_RAN,
) -> list[int]:
    """Finish futures, given content type, body and tokens by future id; keep the bodies of those `kept`.

    Skips futures that have finished already; returns the ids of the others. `ran` is recorded of all.
    """
    ended = _end(conn, {id_: ran.get(id_) for id_ in results}, FutureStatus.DONE, None)
    for future_id in ended:
        _answer(conn, future_id, *results[future_id], keep_body=future_id in kept)
    return ended


def fail(
    conn: Connection, future_id: int, failure: Failure, *, keep_body: bool = False, ran: Ran | None = None
) -> None:
    """Finish with an error, and log it. Does nothing if the future has finished already, but for `ran`."""
    if _end(conn, {future_id: ran}, FutureStatus.FAILED, failure):
        _answer(conn, future_id, JSON_TYPE, failure_body(failure), NO_USAGE, keep_body=keep_body)
        named = select(Future.kind, Future.request_id, Future.session_id).where(Future.id == future_id)
        kind, request, session = conn.execute(named).one()
        told = "%s %s of session %s failed: %s", kind, request, session, failure.message
        after_commit(conn, partial(_log.info, *told))


def fail_missing(
    conn: Connection, model: ModelKey, seq_ids: range, failure: Callable[[int], Failure]
) -> list[int]:
    """Fail those of a live model's numbers that have no request, so that later ones need not wait.

    Returns them. A request that comes too late gets that failure. `failure`: by seq_id.
    """
    live = select(Model.session_id).where(Model.key == model, Model.state.in_(_LIVE))
    session = conn.scalar(live)
    if session is None:
        return []
    of_model = Future.model_key == model
    there = select(Future.seq_id).where(of_model, Future.seq_id.between(seq_ids.start, seq_ids.stop - 1))
    missing = sorted(set(seq_ids).difference(conn.scalars(there)))
    for seq_id in missing:
        new = NewFuture(RequestKind.MISSING, seq_id, b"", session, model_key=model)
        future_id, _ = insert_future(conn, new, None)
        fail(conn, future_id, failure(seq_id))
    return missing


def failure_body(failure: Failure) -> bytes:
    """Return the result that a client gets for a failed future."""
    return orjson.dumps({"error": failure.message, "category": failure.category})


def _answer(
    conn: Connection, future_id: int, content_type: str, body: bytes, usage: Usage, *, keep_body: bool
) -> None:
    key = {"future_id": future_id}
    _RESULT.send(conn, {**key, **values_of(usage), "content_type": content_type, "body": body})
    if not keep_body:
        _DROP_BODY.send(conn, key)


def _end(
    conn: Connection, ran: Mapping[int, Ran | None], status: FutureStatus, failure: Failure | None
) -> list[int]:
    """End futures, given how each ran; returns those that had not finished. Their answers come together."""
    end = {
        "status": status,
        "finished_at": database_time(conn),
        "error": failure and failure.message,
        "category": failure and failure.category,
    }
    sent = [
        (
            future_id,
            _END_RAN.send(conn, {"future_id": future_id, **end, **values_of(each)})
            if each
            else _END.send(conn, {"future_id": future_id, **end}),
        )
        for future_id, each in ran.items()
    ]
    ended = [future_id for future_id, answer in sent if answer.row() is not None]
    for future_id in ran.keys() - ended:
        if each := ran[future_id]:
            record(conn, future_id, each)
    return ended
