"""Slices of rows to delete."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Delete, bindparam, delete, select

from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.tables import Base

SLICE = 50
"""Rows of a slice, which may have large bodies."""

UNUSED = 0.5
"""Unused part of SQLite's file from which it shrinks: less than that is soon filled again."""
_PAGES = 256

Slice = Callable[[Connection], bool]


def shrink(conn: Connection) -> bool:
    """Shrink the database by a slice of unused pages, if it is a file; returns True if there may be more."""
    if conn.dialect.name != "sqlite" or sqlite.unused_part(conn) < UNUSED:
        return False
    return sqlite.free_pages(conn, _PAGES)


def some(table: type[Base], key: Any, *where: ColumnElement[bool]) -> Delete:
    """Return the statement that deletes a slice of the rows for which this holds, for `delete_some`."""
    return delete(table).where(key.in_(select(key).where(*where).limit(bindparam("slice"))))


def delete_some(conn: Connection, statement: Delete, **parameters: Any) -> bool:
    """Delete a slice of rows; returns True if there may be more."""
    return conn.execute(statement, {**parameters, "slice": SLICE}).rowcount == SLICE
