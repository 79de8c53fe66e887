"""A connection in a thread of its own."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import aiosqlite
from sqlalchemy import Connection

from skyrl_tinker.store.database.abstract_database import Database

T = TypeVar("T")


class ThreadedConnection:
    """A connection for reads in a thread that aiosqlite keeps; it asks nothing of the driver beneath."""

    def __init__(self, database: Database) -> None:
        """Use `ThreadedConnection.open`."""
        self._database = database
        self._conn: Connection
        self._thread = aiosqlite.Connection(self._connect, iter_chunk_size=1)
        self._thread._thread.daemon = True  # as SQLAlchemy does: a process that fails must not wait for it

    @classmethod
    async def open(cls, database: Database) -> "ThreadedConnection":
        connection = cls(database)
        await connection._thread
        return connection

    async def read(self, op: Callable[[Connection], T]) -> T:
        """Run `op` in one transaction, in the thread."""
        values: list[T] = []

        def work() -> None:
            with self._database.reading(self._conn):
                values.append(op(self._conn))

        # The thread would keep a returned value until its next call.
        await self._thread._execute(work)  # type: ignore[no-untyped-call]
        return values.pop()

    def usable(self) -> bool:
        """Return whether it can read again."""
        return self._database.usable(self._conn)

    async def close(self) -> None:
        await self._thread.close()

    def _connect(self) -> Any:
        """Return what aiosqlite closes in its thread."""
        self._conn = self._database.connect()
        return SimpleNamespace(close=partial(self._database.release, self._conn))
