"""SQLite as the store wants it: WAL, durable commits, foreign keys, transactions that we begin ourselves.

SQLAlchemy's asyncio driver for SQLite gives each connection a thread and crosses to it for every statement,
which costs more than most statements do. Here a connection works in whatever thread drives it: reads of a few
rows on the event loop, transactions that write or read much as a whole in a thread of their own (`drive`).
"""

import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

import orjson
from sqlalchemy import Connection, NullPool, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from skyrl_tinker.errors import StartupError
from skyrl_tinker.store.database.write_lock import WriteLock

T = TypeVar("T")

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
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    return connection


def writing(path: str, turn: WriteLock) -> AsyncEngine:
    """For a `Transaction` that holds the write lock from the start, in turn with other processes."""
    return _engine(lambda: _WritingConnection(path, turn))


def reading(path: str) -> AsyncEngine:
    """For a `Transaction` that sees the state of its first statement."""
    return _engine(lambda: _Connection(path))


def raw(conn: AsyncConnection) -> sqlite3.Connection:
    """What a connection of these engines works with."""
    return _driver(conn).raw


class Transaction:
    """In place of `conn.begin()`, which costs much even where SQLAlchemy runs nothing: see `prepared`."""

    def __init__(self, conn: AsyncConnection) -> None:
        self._conn = conn
        self._driver = _driver(conn)

    async def __aenter__(self) -> None:
        self._driver.begin()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit, unless something was raised. SQLAlchemy has a transaction, too, if it ran a statement."""
        try:
            if kind is None:
                await (self._conn if self._conn.in_transaction() else self._driver).commit()
        finally:
            if self._conn.in_transaction():
                await self._conn.rollback()
            elif kind is not None or self._driver.raw.in_transaction:
                await self._driver.rollback()


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run, in any thread, a coroutine that awaits nothing but connections of these engines.

    RuntimeError when it awaits something else: there is no event loop to wait on.
    """
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("a database operation may await nothing but its connection")


def json_text(value: Any) -> str:
    """How JSON columns are written."""
    return orjson.dumps(value).decode()


def starts_with(begin: str) -> Callable[[Connection], None]:
    """A listener for the "begin" event."""

    def began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return began


def _driver(conn: AsyncConnection) -> "_Connection":
    pooled = conn.sync_connection
    assert pooled is not None
    return cast(_Connection, pooled.connection.driver_connection)


def _engine(connection: Callable[[], "_Connection"]) -> AsyncEngine:
    """No pool: who reads or writes keeps its connections. Nothing begins but a `Transaction`."""

    async def connected() -> Any:
        return connection()

    return create_async_engine(
        f"{DRIVER}://", async_creator=connected, poolclass=NullPool, json_serializer=json_text
    )


class _Connection:
    """The part of an asyncio DBAPI connection that SQLAlchemy uses. Nothing here ever waits."""

    def __init__(self, path: str) -> None:
        self._connection: sqlite3.Connection | None = connect(path)  # the name that SQLAlchemy looks for

    @property
    def raw(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.OperationalError("connection closed")
        return self._connection

    def cursor(self) -> "_Cursor":
        return _Cursor(self)

    def begin(self) -> None:
        self._execute(BEGIN_READ)

    def _execute(self, sql: str) -> None:
        """Raises SQLAlchemy's OperationalError, as any statement of its does."""
        try:
            self.raw.execute(sql)
        except sqlite3.OperationalError as error:
            raise OperationalError(sql, None, error) from error

    async def create_function(self, *args: Any, **kwargs: Any) -> None:
        self.raw.create_function(*args, **kwargs)

    async def commit(self) -> None:
        self._execute("COMMIT")

    async def rollback(self) -> None:
        self.raw.rollback()

    async def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _WritingConnection(_Connection):
    """Holds the turn from BEGIN to COMMIT or ROLLBACK."""

    def __init__(self, path: str, turn: WriteLock) -> None:
        super().__init__(path)
        self._turn = turn

    def begin(self) -> None:
        self._turn.take()
        try:
            self._execute(BEGIN_WRITE)
        except BaseException:  # no transaction has begun, and none will end it: the others go on
            self._turn.give()
            raise

    async def commit(self) -> None:
        try:
            await super().commit()
        finally:
            self._give()

    async def rollback(self) -> None:
        try:
            await super().rollback()
        finally:
            self._give()

    def _give(self) -> None:
        if not self.raw.in_transaction:
            self._turn.give()


class _Cursor:
    """The part of an asyncio DBAPI cursor that SQLAlchemy uses."""

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
        self._keep(self._connection.raw.execute(sql, parameters))

    async def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        self._keep(self._connection.raw.executemany(sql, parameters))

    async def fetchall(self) -> list[Any]:
        return self._rows

    async def close(self) -> None:
        """Nothing is open between statements."""

    def _keep(self, cursor: sqlite3.Cursor) -> None:
        self.description = cursor.description
        self.rowcount = cursor.rowcount
        self.lastrowid = cursor.lastrowid
        self._rows = cursor.fetchall() if cursor.description else []
        cursor.close()
