"""End of futures: once, with bytes that stay fetchable."""

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from skyrl_tinker.domain.ids import FutureStatus
from skyrl_tinker.domain.values import Failure, Usage
from skyrl_tinker.store.database.abstract_database import after_commit
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.database.tables import Future, Request, Result

JSON_TYPE = "application/json"
NO_USAGE = Usage()
_log = logging.getLogger(__name__)

_END = Prepared(
    update(Future)
    .where(Future.id == bindparam("future_id"), Future.status == FutureStatus.PENDING)
    .values({name: bindparam(name) for name in ("status", "finished_at", "error", "category")})
)
_RESULT = Prepared(
    insert(Result), ("future_id", "content_type", "body", "input_tokens", "cached_tokens", "output_tokens")
)
_DROP_BODY = Prepared(delete(Request).where(Request.future_id == bindparam("future_id")))


def succeed(
    conn: Connection, future_id: int, content_type: str, body: bytes, usage: Usage = NO_USAGE
) -> None:
    """Finish with the bytes that the client gets. Does nothing if the future has finished already."""
    succeed_all(conn, {future_id: (content_type, body, usage)})


def succeed_all(
    conn: Connection, results: Mapping[int, tuple[str, bytes, Usage]], replayed: Collection[int] = ()
) -> list[int]:
    """Finish futures, given content type, body and tokens by future id; keep the bodies of those `replayed`.

    Skips futures that have finished already; returns the ids of the others.
    """
    end = _end(conn, FutureStatus.DONE, None)
    return [
        future_id
        for future_id, result in results.items()
        if _finish(conn, future_id, end, *result, keep_body=future_id in replayed)
    ]


def fail(conn: Connection, future_id: int, failure: Failure, *, keep_body: bool = False) -> None:
    """Finish with an error, and log it. Does nothing if the future has finished already."""
    end, body = _end(conn, FutureStatus.FAILED, failure), failure_body(failure)
    if _finish(conn, future_id, end, JSON_TYPE, body, NO_USAGE, keep_body=keep_body):
        named = select(Future.kind, Future.request_id, Future.session_id).where(Future.id == future_id)
        kind, request, session = conn.execute(named).one()
        told = "%s %s of session %s failed: %s", kind, request, session, failure.message
        after_commit(conn, partial(_log.info, *told))


def failure_body(failure: Failure) -> bytes:
    """Return the result that a client gets for a failed future."""
    return orjson.dumps({"error": failure.message, "category": failure.category})


def _finish(
    conn: Connection,
    future_id: int,
    end: Mapping[str, Any],
    content_type: str,
    body: bytes,
    usage: Usage,
    *,
    keep_body: bool = False,
) -> bool:
    """Finish a future. Returns False if it has finished already."""
    key = {"future_id": future_id}
    if not _END.change(conn, {**key, **end}):
        return False
    tokens = {name: getattr(usage, name) for name in ("input_tokens", "cached_tokens", "output_tokens")}
    _RESULT.change(conn, {**key, **tokens, "content_type": content_type, "body": body})
    if not keep_body:
        _DROP_BODY.change(conn, key)
    return True


def _end(conn: Connection, status: FutureStatus, failure: Failure | None) -> dict[str, Any]:
    return {
        "status": status,
        "finished_at": database_time(conn),
        "error": failure and failure.message,
        "category": failure and failure.category,
    }
