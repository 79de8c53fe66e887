"""SQLite as the store uses it: WAL, durable commits, foreign keys, and transactions begun explicitly."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, Engine, NullPool, create_engine, event
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import StartupError
from skyrl_tinker.store.database.abstract_database import json_text

BUSY_TIMEOUT_S = 30.0
DRIVER = "sqlite"
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
BEGIN_READ, BEGIN_WRITE = "BEGIN", "BEGIN IMMEDIATE"
_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA journal_size_limit = 67108864",
)


def connect(path: str) -> sqlite3.Connection:
    """Connect without the driver's implicit transactions, which break SAVEPOINT and BEGIN IMMEDIATE."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    if connection.execute("PRAGMA page_count").fetchone() == (0,):  # of others it takes a lock
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    connection.create_function("json_member", 2, _json_member, deterministic=True)
    return connection


def _json_member(text: str, key: str) -> str:
    """Return the JSON of a member of a stored object, null without it.

    SQLite's own functions read integers from 2^63 on as floats.
    """
    return json_text(orjson.loads(text).get(key))


def engine(path: str, home: Path | None = None) -> Engine:
    """Return an engine whose connections serve one `transaction` at a time.

    `home`: base of relative `file_paths`, by default the database's directory.
    """
    made = create_engine(
        "sqlite://",
        creator=lambda: connect(path),
        poolclass=NullPool,
        json_serializer=json_text,
        execution_options={"home": home or Path(path).absolute().parent, "file": path},
    )
    event.listen(made, "handle_error", lambda context: _require_whole(path, context.original_exception))
    return made


def raw(conn: Connection) -> sqlite3.Connection:
    """Return the driver's connection beneath a connection of `engine`."""
    driver = conn.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


@contextmanager
def transaction(conn: Connection, begin: str = BEGIN_READ) -> Iterator[None]:
    """Begin, then commit, or roll back on an exception in between. Raises SQLAlchemy's OperationalError.

    This calls the driver directly: `conn.begin()` costs several times as much (see `prepared`). SQLAlchemy,
    which begins nothing in this driver, takes all that succeeds for one transaction.
    """
    execute(conn, begin)
    try:
        yield
        execute(conn, "COMMIT")
    except BaseException:  # whatever it is: the next one must not find a transaction begun
        conn.rollback()
        raw(conn).rollback()  # where SQLAlchemy ran no statement
        raise


def free_pages(conn: Connection, most: int) -> bool:
    """Give unused pages at the end of the file back to the disk, at most so many; returns True if there were.

    Not those of a file that an older release has made.
    """
    before = _page_count(conn)
    execute(conn, f"PRAGMA incremental_vacuum({most})").fetchall()
    return _page_count(conn) < before


def unused_part(conn: Connection) -> float:
    """Return which part of the file's pages has nothing in it."""
    (unused,) = execute(conn, "PRAGMA freelist_count").fetchone()
    return float(unused / max(1, _page_count(conn)))


def _page_count(conn: Connection) -> int:
    (count,) = execute(conn, "PRAGMA page_count").fetchone()
    return int(count)


def execute(conn: Connection, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
    """Run SQL in the driver. Raises SQLAlchemy's OperationalError, and StartupError for a damaged file."""
    try:
        return raw(conn).execute(sql, parameters)
    except sqlite3.OperationalError as error:
        raise OperationalError(sql, None, error) from error
    except sqlite3.DatabaseError as error:
        _require_whole(conn.get_execution_options()["file"], error)
        raise


def _require_whole(path: str, error: BaseException) -> None:
    """Raise StartupError if the driver raised this for a damaged file."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
        raise StartupError(
            f"the database {path} is damaged ({error}): with the server stopped, put a copy in its place, as "
            "`skyrl-tinker db backup` makes them, and delete the files beside it that end in -wal and -shm"
        ) from error
