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
from skyrl_tinker.store import stability_records
from skyrl_tinker.store.database.abstract_database import after_commit
from skyrl_tinker.store.database.prepared import Prepared, Sent
from skyrl_tinker.store.database.rows import database_time, values_of
from skyrl_tinker.store.database.tables import Future, Model, Request, Result
from skyrl_tinker.store.futures.record import NewFuture, insert_future
from skyrl_tinker.store.stability_records import SequenceRecord

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
    update(Future).where(Future.id == bindparam("future_id")).values({name: bindparam(name) for name in _RAN})
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


@dataclass(frozen=True, slots=True)
class FutureResult:
    """Result as the bytes for the client, its tokens, and the records to keep of its sequences.

    `keep_body`: that of the request stays, to be read.
    """

    content_type: str
    body: bytes
    records: tuple[SequenceRecord, ...] = ()
    usage: Usage = NO_USAGE
    keep_body: bool = False


FutureOutcome = FutureResult | Failure


def succeed(
    conn: Connection, future_id: int, content_type: str, body: bytes, usage: Usage = NO_USAGE
) -> None:
    """Finish with the bytes that the client gets. Does nothing if the future has finished already."""
    finish_all(conn, {future_id: FutureResult(content_type, body, usage=usage)})


def fail(conn: Connection, future_id: int, failure: Failure) -> None:
    """Finish with an error, and log it. Does nothing if the future has finished already."""
    finish_all(conn, {future_id: failure})


def finish_all(
    conn: Connection,
    outcomes: Mapping[int, FutureOutcome],
    kept: Collection[int] = (),
    ran: Mapping[int, Ran] = NOTHING_RAN,
) -> None:
    """Finish futures, by id; keep the bodies of those `kept`. `ran` is recorded of all.

    Skips futures that have finished already.
    """
    now = database_time(conn)
    sent = {id_: _end(conn, id_, outcome, ran.get(id_), now) for id_, outcome in outcomes.items()}
    ended = {id_: outcomes[id_] for id_, answer in sent.items() if answer.row() is not None}
    for future_id, outcome in ended.items():
        _answer(conn, future_id, outcome, keep_body=future_id in kept)
    for future_id in ran.keys() & (outcomes.keys() - ended.keys()):
        record(conn, future_id, ran[future_id])
    results = {id_: outcome for id_, outcome in ended.items() if isinstance(outcome, FutureResult)}
    if records := {id_: result.records for id_, result in results.items() if result.records}:
        stability_records.add(conn, records)


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


def _end(conn: Connection, future_id: int, outcome: FutureOutcome, ran: Ran | None, now: float) -> Sent:
    """End a future that has not finished, which this returns. The answers to several come together."""
    failure = outcome if isinstance(outcome, Failure) else None
    end = {
        "future_id": future_id,
        "status": FutureStatus.FAILED if failure else FutureStatus.DONE,
        "finished_at": now,
        "error": failure and failure.message,
        "category": failure and failure.category,
    }
    return _END_RAN.send(conn, {**end, **values_of(ran)}) if ran else _END.send(conn, end)


def _answer(conn: Connection, future_id: int, outcome: FutureOutcome, *, keep_body: bool) -> None:
    key = {"future_id": future_id}
    result = FutureResult(JSON_TYPE, failure_body(outcome)) if isinstance(outcome, Failure) else outcome
    content = {"content_type": result.content_type, "body": result.body}
    _RESULT.send(conn, {**key, **values_of(result.usage), **content})
    if not (keep_body or result.keep_body):
        _DROP_BODY.send(conn, key)
    if isinstance(outcome, Failure):
        named = select(Future.kind, Future.request_id, Future.session_id).where(Future.id == future_id)
        kind, request, session = conn.execute(named).one()
        told = "%s %s of session %s failed: %s", kind, request, session, outcome.message
        after_commit(conn, partial(_log.info, *told))
