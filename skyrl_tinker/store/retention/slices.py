"""Slices of rows to delete."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, select

from skyrl_tinker.store.database.tables import Base

SLICE = 50
"""Rows of a slice, which may have large bodies."""

Slice = Callable[[Connection], bool]


def delete_some(conn: Connection, table: type[Base], key: Any, *where: ColumnElement[bool]) -> bool:
    """Delete a slice of the rows for which this holds; returns True if there may be more."""
    some = select(key).where(*where).limit(SLICE)
    return conn.execute(delete(table).where(key.in_(some))).rowcount == SLICE
