"""Time in rows: of the one clock that all processes ask, as those of their hosts differ.

It is that of the database's host; processes with a file are on one host.
"""

import time

from sqlalchemy import Connection

SKEW = "skew_s"
"""Where a connection keeps by how much that clock is ahead of this host's; each transaction sets it."""


def now(conn: Connection) -> float:
    """Return the seconds since the epoch."""
    return time.time() + float(conn.info.get(SKEW, 0.0))
