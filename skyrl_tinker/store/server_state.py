"""Facts of `serve` and the engine for the API ("base_model", "engine", "warning"), and counters of all."""

import secrets
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import ServerState

WARNING = "warning"
"""Key of a warning to all users: text, or None."""

ENGINE_ADDRESS = "engine_address"
"""Key of HOST:PORT by which API processes on other hosts reach the engine; None: by none."""
LEASE = "lease"
"""Key of the lease of the server that works on the database."""
IDENTITY = "identity"
"""Key of a random text that tells this database from others."""
SECRETS = "secrets"
"""Key of the fingerprint of the signing secrets."""
SETTINGS = "settings"
"""Key of the server's settings, which API processes on other hosts take over."""
EXPECTED = "expected"
"""Key of which training requests are on their way, see store.futures.expected_requests."""
GAPS = "gaps"
"""Key of when the engine last wrote that it looks at missing requests: that the database takes writes."""
SERVER = "server"
"""Key of `serve` itself: its pid, and when it was started."""
_GET = Prepared(select(ServerState.value).where(ServerState.key == bindparam("key")))
_CHANGE = Prepared(
    update(ServerState).where(ServerState.key == bindparam("of")).values(value=bindparam("value"))
)
_ADD = Prepared(insert(ServerState), ("key", "value"))


def put(conn: Connection, key: str, value: Any) -> None:
    """Set `key` to any JSON value."""
    if not _CHANGE.change(conn, {"of": key, "value": value}):
        _ADD.change(conn, {"key": key, "value": value})


def identity(conn: Connection) -> str:
    """Return the database's, which is drawn at the first call."""
    drawn: str | None = get(conn, IDENTITY)
    if drawn is None:
        drawn = secrets.token_hex(16)
        put(conn, IDENTITY, drawn)
    return drawn


def get(conn: Connection, key: str) -> Any | None:
    """Return the value, None if it was never set."""
    row = _GET.row(conn, {"key": key})
    return None if row is None else row.value
