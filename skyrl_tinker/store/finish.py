"""How futures end: once, with bytes that stay fetchable."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import bindparam, delete, insert, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.store import usage as usages
from skyrl_tinker.store.tables import Future, Request, Result
from skyrl_tinker.wire.ids import FutureStatus
from skyrl_tinker.wire.values import Failure, Usage

JSON_TYPE = "application/json"
NO_USAGE = Usage()

# Built once: making a statement costs more than running it.
_END = update(Future).where(
    Future.id == bindparam("future_id"), Future.status == literal(FutureStatus.PENDING, Future.status.type)
)
_END = _END.values({name: bindparam(name) for name in ("status", "finished_at", "error", "category")})
_DONE = (
    update(Future)
    .where(
        Future.id.in_(bindparam("future_ids", expanding=True)),
        Future.status == literal(FutureStatus.PENDING, Future.status.type),
    )
    .values(status=FutureStatus.DONE, finished_at=bindparam("now"))
    .returning(Future.id)
)
_RESULT = insert(Result)
_DROP_BODIES = delete(Request).where(Request.future_id.in_(bindparam("future_ids", expanding=True)))


async def succeed(
    conn: AsyncConnection, future_id: int, content_type: str, body: bytes, usage: Usage = NO_USAGE
) -> None:
    """Finish with the bytes that the client gets. Nothing happens if it has finished already."""
    await succeed_all(conn, {future_id: (content_type, body, usage)})


async def succeed_all(conn: AsyncConnection, results: Mapping[int, tuple[str, bytes, Usage]]) -> list[int]:
    """Content type, body and tokens by future id. Returns the ids of those that had not finished already; the
    others are passed over."""
    ended = await conn.execute(_DONE, {"future_ids": list(results), "now": time.time()})
    ids = sorted(ended.scalars())
    if ids:
        await conn.execute(_RESULT, [_result(id_, *results[id_]) for id_ in ids])
        await _drop_bodies(conn, ids)
    return ids


def _result(future_id: int, content_type: str, body: bytes, usage: Usage) -> dict[str, Any]:
    return {
        "future_id": future_id,
        "content_type": content_type,
        "body": body,
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


async def fail(conn: AsyncConnection, future_id: int, failure: Failure) -> None:
    """Finish with an error. Nothing happens if it has finished already."""
    key = {"future_id": future_id}
    if (await conn.execute(_END, key | _end(FutureStatus.FAILED, failure))).rowcount:
        await conn.execute(_RESULT, key | {"content_type": JSON_TYPE, "body": failure_body(failure)})
        await _drop_bodies(conn, [future_id])


async def fail_pending(conn: AsyncConnection, up_to_id: int | None, failure: Failure) -> int:
    """Fail all that is pending (up to an id): what a dead engine left. Returns how many."""
    pending = [Future.status == FutureStatus.PENDING]
    if up_to_id is not None:
        pending.append(Future.id <= up_to_id)
    result = select(Future.id, literal(JSON_TYPE), literal(failure_body(failure))).where(*pending)
    results = insert(Result).from_select(["future_id", "content_type", "body"], result.order_by(Future.id))
    await conn.execute(results)
    await conn.execute(delete(Request).where(Request.future_id.in_(select(Future.id).where(*pending))))
    end = update(Future).where(*pending).values(_end(FutureStatus.FAILED, failure))
    return (await conn.execute(end)).rowcount


async def purge_results(conn: AsyncConnection, older_than: float) -> int:
    """Drop result bytes of futures that finished before `older_than`; the futures stay, so dedupe holds.

    Results are in the order in which their futures finished: no more is read than goes.
    """
    await usages.roll_up(conn)
    in_order = select(Result.id).join(Future, Future.id == Result.future_id).order_by(Result.id)
    stays = await conn.scalar(in_order.where(Future.finished_at >= older_than).limit(1))
    old = [] if stays is None else [Result.id < stays]
    return (await conn.execute(delete(Result).where(*old))).rowcount


def failure_body(failure: Failure) -> bytes:
    """What a client gets that fetches a failed future."""
    return orjson.dumps({"error": failure.message, "category": failure.category})


async def _drop_bodies(conn: AsyncConnection, future_ids: Sequence[int]) -> None:
    """Until there are snapshots to replay from, nothing needs the body of a finished request."""
    await conn.execute(_DROP_BODIES, {"future_ids": future_ids})


def _end(status: FutureStatus, failure: Failure) -> dict[str, Any]:
    return {
        "status": status,
        "finished_at": time.time(),
        "error": failure.message,
        "category": failure.category,
    }
