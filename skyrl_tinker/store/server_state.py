"""Facts that `serve` and the engine leave for the API: "base_model", "engine", "warning"; and its secrets."""

import secrets
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.store.database.tables import ServerState

WARNING = "warning"
"""What every user should know: text, or None while all is well."""


async def put(conn: AsyncConnection, key: str, value: Any) -> None:
    """Set `key` to any JSON value."""
    changed = await conn.execute(update(ServerState).where(ServerState.key == key).values(value=value))
    if not changed.rowcount:
        await conn.execute(insert(ServerState).values(key=key, value=value))


async def get(conn: AsyncConnection, key: str) -> Any | None:
    """The value, or None if it was never set."""
    return await conn.scalar(select(ServerState.value).where(ServerState.key == key))


async def secret(conn: AsyncConnection, name: str) -> bytes:
    """32 random bytes, made when first asked for and the same ever after: so, in a write."""
    key = f"secret.{name}"
    if (found := await get(conn, key)) is None:
        found = secrets.token_hex(32)
        await put(conn, key, found)
    return bytes.fromhex(found)
