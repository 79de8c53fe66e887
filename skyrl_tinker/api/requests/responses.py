"""Responses that may be long."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from starlette.responses import Response, StreamingResponse

from skyrl_tinker.domain.ids import Reach
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.protocol.schemas.base import Message
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.store import Store

K = TypeVar("K")
Items = Callable[[Connection, Sequence[K]], Iterable[str]]
"""Reads the items of some keys, each as JSON."""
JSON = "application/json"
PART_CHARACTERS = MiB
"""JSON that is sent before more rows are read."""
AT_ONCE = 16
"""Items that are read before their characters are counted: each may have metadata of `keys.metadata_kb`."""


async def json_from_rows(store: Store, reach: Reach, read: Op[Message]) -> Response:
    """Return the message that `read` builds, as JSON; reading and encoding run in a thread."""

    def as_json(conn: Connection) -> bytes:
        return read(conn).model_dump_json().encode()

    return Response(await store.report(as_json, reach), media_type=JSON)


async def json_by_parts(
    store: Store, reach: Reach, message: Message, field: str, keys: Sequence[K], items: Items[K]
) -> StreamingResponse:
    """Return the message with an item for each key in its last list or object, `field`, which is empty.

    However long it is, a part of it is in memory at a time.
    """
    start, name, rest = message.model_dump_json().rpartition(f'"{field}":')
    return await streamed(_parts(store, reach, start + name + rest[0], keys, items, rest[1:]))


async def streamed(parts: AsyncIterator[str]) -> StreamingResponse:
    """Return JSON in parts; errors of the first one are raised, as the answer has not begun."""
    return StreamingResponse(_chained(await anext(parts), parts), media_type=JSON)


async def _chained(first: str, others: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for part in others:
        yield part


async def _parts(
    store: Store, reach: Reach, text: str, keys: Sequence[K], items: Items[K], end: str
) -> AsyncIterator[str]:
    sign = ""
    while keys:
        found, keys = await store.report(partial(_some, keys=keys, items=items), reach)
        if found:
            yield text + sign + ",".join(found)
            text, sign = "", ","
    yield text + end


def _some(conn: Connection, keys: Sequence[K], items: Items[K]) -> tuple[list[str], Sequence[K]]:
    """Return the items of the first keys, and the other keys."""
    found, size = list[str](), 0
    while keys and size < PART_CHARACTERS:
        read = list(items(conn, keys[:AT_ONCE]))
        found, size, keys = found + read, size + sum(map(len, read)), keys[AT_ONCE:]
    return found, keys
