"""SQLite as the store wants it: WAL, durable commits, foreign keys, transactions that we begin ourselves.

aiosqlite crosses to its thread for every cursor, execute, fetch and close; `_Cursor` crosses once per
statement, and BEGIN goes with the first of them, which takes a third off the time of a small write.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import aiosqlite
from sqlalchemy import AsyncAdaptedQueuePool, Connection, event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from skyrl_tinker.errors import StartupError
from skyrl_tinker.store.turn import Turn

BUSY_TIMEOUT_S = 30.0
DRIVER = "sqlite+aiosqlite"
BEGIN_READ, BEGIN_WRITE = "BEGIN", "BEGIN IMMEDIATE"
_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA journal_size_limit = 67108864",
)


def database(url: str) -> str:
    """The path of the database file. Raises StartupError unless it names a SQLite file."""
    parsed = make_url(url)
    if parsed.drivername != DRIVER or not parsed.database or parsed.database == ":memory:":
        raise StartupError(
            f"database_url {parsed.render_as_string()!r} cannot be used: "
            f"only SQLite files are supported so far, as in {DRIVER}:////absolute/path/to/file.db"
        )
    return parsed.database


def connect(path: str) -> sqlite3.Connection:
    """Python's driver must not begin or commit by itself: that breaks SAVEPOINT and BEGIN IMMEDIATE."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    return connection


def writing(path: str, turn: Turn) -> AsyncEngine:
    """One connection, whose transactions hold the write lock from the start, in turn with other processes."""
    return _engine(lambda: _WritingConnection(path, turn), BEGIN_WRITE, connections=1)


def reading(path: str, connections: int) -> AsyncEngine:
    """Connections whose transactions see the state of their first statement."""
    return _engine(lambda: _Connection(path), BEGIN_READ, connections)


def starts_with(begin: str) -> Callable[[Connection], None]:
    """A listener for the "begin" event."""

    def began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return began


def _engine(connection: Callable[[], "_Connection"], begin: str, connections: int) -> AsyncEngine:
    async def connected() -> aiosqlite.Connection:
        return await connection()

    made = create_async_engine(
        f"{DRIVER}://",
        async_creator=connected,
        poolclass=AsyncAdaptedQueuePool,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=BUSY_TIMEOUT_S,
    )
    event.listen(made.sync_engine, "begin", starts_with(begin))
    return made


class _Connection(aiosqlite.Connection):
    def __init__(self, path: str) -> None:
        super().__init__(lambda: connect(path), iter_chunk_size=64)
        self._thread.daemon = True  # as SQLAlchemy does: a connection never keeps the process alive
        self.begin: str | None = None  # asked for, and run with the statement that comes next

    def cursor(self) -> "_Cursor":  # type: ignore[override]
        return _Cursor(self)

    async def on_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        await self._execute(function, *arguments)  # type: ignore[no-untyped-call]

    def run(self, method: str, sql: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        """On the thread: `execute` or `executemany`."""
        if self.begin is not None:
            begin, self.begin = self.begin, None
            self.run_begin(begin)
        cursor: sqlite3.Cursor = getattr(self._conn, method)(sql, parameters)
        return cursor

    def run_begin(self, begin: str) -> None:
        self._conn.execute(begin)

    async def commit(self) -> None:
        await self._end(self._conn.commit)

    async def rollback(self) -> None:
        await self._end(self._conn.rollback)

    async def _end(self, end: Callable[[], None]) -> None:
        if self.begin is not None:  # nothing was asked: there is no transaction to end
            self.begin = None
        else:
            await self.on_thread(self.run_end, end)

    def run_end(self, end: Callable[[], None]) -> None:
        end()


class _WritingConnection(_Connection):
    """Holds the turn from BEGIN to COMMIT or ROLLBACK."""

    def __init__(self, path: str, turn: Turn) -> None:
        super().__init__(path)
        self._turn = turn

    def run_begin(self, begin: str) -> None:
        self._turn.take()
        super().run_begin(begin)

    def run_end(self, end: Callable[[], None]) -> None:
        try:
            end()
        finally:
            self._turn.give()


class _Cursor:
    """The part of a DBAPI cursor that SQLAlchemy's asyncio adapter uses."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None
        self.arraysize = 1

    async def __aenter__(self) -> "_Cursor":
        return self

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        if sql in (BEGIN_READ, BEGIN_WRITE):
            self._connection.begin = sql
            return
        await self._connection.on_thread(self._run, "execute", sql, parameters)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        await self._connection.on_thread(self._run, "executemany", sql, parameters)

    async def fetchall(self) -> list[Any]:
        return self._rows

    async def close(self) -> None:
        """Nothing is open between statements."""

    def _run(self, method: str, sql: str, parameters: Sequence[Any]) -> None:
        """On the connection's thread: execute, fetch, close."""
        cursor = self._connection.run(method, sql, parameters)
        self.description = cursor.description
        self.rowcount = cursor.rowcount
        self.lastrowid = cursor.lastrowid
        self._rows = cursor.fetchall() if cursor.description else []
        cursor.close()
