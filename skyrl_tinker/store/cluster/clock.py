"""Time in rows: of the one clock that all processes ask, as those of their hosts differ.

It is that of the database's host; processes with a file are on one host.
"""

import time

from sqlalchemy import Connection

from skyrl_tinker.store.database.abstract_database import SKEW


def now(conn: Connection) -> float:
    """Return the seconds since the epoch."""
    return time.time() + float(conn.info.get(SKEW, 0.0))
