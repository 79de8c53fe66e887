"""Facts that `serve` and the engine leave for the API: "base_model", "engine", "warning"; and its secrets."""

import secrets
from typing import Any

from sqlalchemy import Connection, insert, select, update

from skyrl_tinker.store.database.tables import ServerState

WARNING = "warning"
"""What every user should know: text, or None while all is well."""


def put(conn: Connection, key: str, value: Any) -> None:
    """Set `key` to any JSON value."""
    changed = conn.execute(update(ServerState).where(ServerState.key == key).values(value=value))
    if not changed.rowcount:
        conn.execute(insert(ServerState).values(key=key, value=value))


def get(conn: Connection, key: str) -> Any | None:
    """The value, or None if it was never set."""
    return conn.scalar(select(ServerState.value).where(ServerState.key == key))


def get_or_create_secret(conn: Connection, name: str) -> bytes:
    """32 random bytes, made when first asked for and the same ever after: so, in a write."""
    key = f"secret.{name}"
    if (found := get(conn, key)) is None:
        found = secrets.token_hex(32)
        put(conn, key, found)
    return bytes.fromhex(found)
