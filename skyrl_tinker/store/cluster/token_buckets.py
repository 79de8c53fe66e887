"""Token buckets that all API processes of a database share, each a value of `server_state`."""

from sqlalchemy import Connection

from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.rows import database_time

_PART = 0.25


def take(conn: Connection, name: str, *, rate: float, most: float, wanted: float) -> tuple[int, float]:
    """Take at most `wanted` tokens from a bucket that holds `most` and gets `rate` a second.

    Of few that are left it takes a part, so that others find some. Returns the number taken, and the
    number that the bucket then has. Writers take turns, so all is counted.
    """
    now = database_time(conn)
    left, counted_at = server_state.get(conn, name) or (most, now)
    left = min(most, left + max(0.0, now - counted_at) * rate)
    taken = int(min(wanted, max(1.0, left * _PART), left))
    if taken:
        server_state.put(conn, name, (left - taken, now))
    return taken, left - taken
