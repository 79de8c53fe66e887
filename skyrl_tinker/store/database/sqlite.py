"""SQLite as the store uses it: WAL, durable commits, foreign keys, and transactions begun explicitly.

A connection runs each transaction as a whole in one thread: a read of a few rows in the caller's, a large one
in a thread that aiosqlite keeps. SQLAlchemy's AsyncEngine crosses to that thread at least five times a
transaction, which takes longer than most statements: 0.6 ms for one row against 0.2.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
import orjson
from sqlalchemy import Connection, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import StartupError

BUSY_TIMEOUT_S = 30.0
DRIVER = "sqlite+aiosqlite"
BEGIN_READ, BEGIN_WRITE = "BEGIN", "BEGIN IMMEDIATE"
NO_CHECKPOINTS = "PRAGMA wal_autocheckpoint = 0"
"""For a connection whose commits leave them to WalCheckpointer."""
T = TypeVar("T")
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
    """Connect without the driver's implicit transactions, which break SAVEPOINT and BEGIN IMMEDIATE."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    return connection


def engine(path: str, home: Path | None = None) -> Engine:
    """Return an engine whose connections serve one `transaction` at a time.

    `home`: what `file_paths` are relative to, by default the database's directory.
    """
    return create_engine(
        "sqlite://",
        creator=lambda: connect(path),
        poolclass=NullPool,
        json_serializer=json_text,
        execution_options={"home": home or Path(path).absolute().parent},
    )


def raw(conn: Connection) -> sqlite3.Connection:
    """Return the driver's connection beneath a connection of `engine`."""
    driver = conn.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


@contextmanager
def transaction(conn: Connection, begin: str = BEGIN_READ) -> Iterator[None]:
    """Begin, then commit, or roll back what was raised in between. Raises SQLAlchemy's OperationalError.

    This calls the driver directly: `conn.begin()` costs several times as much (see `prepared`). SQLAlchemy,
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


def execute(conn: Connection, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
    """Run SQL in the driver. Raises SQLAlchemy's OperationalError."""
    try:
        return raw(conn).execute(sql, parameters)
    except sqlite3.OperationalError as error:
        raise OperationalError(sql, None, error) from error


class ThreadedConnection:
    """A connection for reads in a thread of its own, which aiosqlite keeps."""

    def __init__(self, conn: Connection) -> None:
        """Use `ThreadedConnection.open`."""
        self._conn = conn
        self._driver = aiosqlite.Connection(lambda: raw(conn), iter_chunk_size=1)
        self._driver._thread.daemon = True  # as SQLAlchemy does: a process that fails must not wait for it

    @classmethod
    async def open(cls, engine: Engine) -> "ThreadedConnection":
        connection = cls(engine.connect())
        await connection._driver
        return connection

    async def read(self, op: Callable[[Connection], T]) -> T:
        """Run `op` in one transaction, in the thread."""
        values: list[T] = []

        def work() -> None:
            with transaction(self._conn):
                values.append(op(self._conn))

        # The thread would keep a returned value until its next call.
        await self._driver._execute(work)  # type: ignore[no-untyped-call]
        return values.pop()

    async def close(self) -> None:
        await self._driver._execute(self._conn.close)  # type: ignore[no-untyped-call]
        await self._driver.close()


def json_text(value: Any) -> str:
    """Return the text that is stored in JSON columns."""
    return orjson.dumps(value).decode()


def starts_with(begin: str) -> Callable[[Connection], None]:
    """Return a listener for SQLAlchemy's "begin" event."""

    def began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return began
