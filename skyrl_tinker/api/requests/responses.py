"""Responses that may be long."""

from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.protocol.schemas.base import Message
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.store import Store


async def json_from_rows(store: Store, read: Op[Message]) -> Response:
    """Return the message that `read` builds, as JSON; reading and encoding run in a thread."""

    def as_json(conn: Connection) -> str:
        return read(conn).model_dump_json()

    return Response(await store.fetch(as_json), media_type="application/json")
