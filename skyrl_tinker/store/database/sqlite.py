"""SQLite as the store uses it: WAL, durable commits, foreign keys, and transactions begun explicitly.

Writes and reads of a few rows run on the standard library's driver, in the calling thread: aiosqlite crosses
to a thread of its own for every call, which takes ten times as long as reading a row (0.6 ms against 0.05).
Bodies and listings are large enough for that, and are read through it.
"""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiosqlite
import orjson
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from skyrl_tinker.errors import StartupError

BUSY_TIMEOUT_S = 30.0
DRIVER = "sqlite+aiosqlite"
BEGIN_READ, BEGIN_WRITE = "BEGIN", "BEGIN IMMEDIATE"
_EXPLICIT: dict[str, Any] = {"timeout": BUSY_TIMEOUT_S, "isolation_level": None}
"""A driver that begins or commits implicitly would break SAVEPOINT and BEGIN IMMEDIATE."""
_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA journal_size_limit = 67108864",
)


def database(url: str) -> str:
    """Return the path of the database file. Raises StartupError unless the URL names a SQLite file."""
    parsed = make_url(url)
    if parsed.drivername != DRIVER or not parsed.database or parsed.database == ":memory:":
        raise StartupError(
            f"database_url {parsed.render_as_string()!r} cannot be used: "
            f"only SQLite files are supported so far, as in {DRIVER}:////absolute/path/to/file.db"
        )
    return parsed.database


def connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, **_EXPLICIT)
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    return connection


def engine(path: str) -> Engine:
    """Return an engine whose connections work in the calling thread, each in one `transaction` at a time."""
    return create_engine(
        "sqlite://", creator=lambda: connect(path), poolclass=NullPool, json_serializer=json_text
    )


def async_engine(path: str) -> AsyncEngine:
    """Return an engine whose connections each run their statements in a thread of their own."""
    url = URL.create(DRIVER, database=path)
    return create_async_engine(url, poolclass=NullPool, json_serializer=json_text, connect_args=_EXPLICIT)


def raw(conn: Connection) -> sqlite3.Connection:
    """Return the driver's connection beneath a connection of `engine`."""
    driver = conn.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError("a prepared statement runs in `Store.read` and `Store.write`, not in `Store.fetch`")
    return driver


@contextmanager
def transaction(conn: Connection, begin: str = BEGIN_READ) -> Iterator[None]:
    """Begin, then commit, or roll back what was raised in between. Raises SQLAlchemy's OperationalError.

    The driver is spoken to directly: `conn.begin()` costs several times as much (see `prepared`). SQLAlchemy,
    which begins nothing in this driver, takes all that succeeds for one transaction.
    """
    execute(conn, begin)
    try:
        yield
        execute(conn, "COMMIT")
    except BaseException:
        conn.rollback()
        raw(conn).rollback()  # where SQLAlchemy ran no statement
        raise


@asynccontextmanager
async def async_transaction(conn: AsyncConnection) -> AsyncIterator[None]:
    """Begin and end a read in a connection of `async_engine`, with one call of the driver each."""
    driver = (await conn.get_raw_connection()).driver_connection
    assert isinstance(driver, aiosqlite.Connection)
    await driver.execute(BEGIN_READ)
    try:
        yield
    finally:
        await driver.rollback()


def execute(conn: Connection, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
    """Run SQL in the driver. Raises SQLAlchemy's OperationalError."""
    try:
        return raw(conn).execute(sql, parameters)
    except sqlite3.OperationalError as error:
        raise OperationalError(sql, None, error) from error


def json_text(value: Any) -> str:
    """Return the text that is stored in JSON columns."""
    return orjson.dumps(value).decode()


def starts_with(begin: str) -> Callable[[Connection], None]:
    """Return a listener for SQLAlchemy's "begin" event."""

    def began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return began
