"""Answers that may be long."""

from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.protocol.schemas.base import Message
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.store import Store


async def from_rows(store: Store, read: Op[Message]) -> Response:
    """What `read` makes of rows, as JSON: all of it in a thread, while the loop serves others."""

    def as_json(conn: Connection) -> str:
        return read(conn).model_dump_json()

    return Response(await store.fetch(as_json), media_type="application/json")
