"""Store shared by API and engine. An acknowledged write is on disk."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.group_commit import Op, T, Writer
from skyrl_tinker.store.database.wal_checkpointer import WalCheckpointer
from skyrl_tinker.store.database.write_lock import WriteLock


def write_once(url: str, op: Op[T], home: Path | None = None) -> T:
    """Commit one write to a migrated database, which a server may have open, and return its value."""
    path = sqlite.database(url)
    with (
        closing(WriteLock(path)) as lock,
        sqlite.engine(path, home).connect() as conn,
        lock,
        sqlite.transaction(conn, sqlite.BEGIN_WRITE),
    ):
        return op(conn)


class Store:
    """Group commits in a thread, reads of rows on the loop, reads of bodies and listings in threads.

    Statements are plain functions of a connection. Readers never wait for the writer.
    """

    def __init__(self, path: str, home: Path | None) -> None:
        """Use `Store.open`."""
        self._lock = WriteLock(path)
        self._engine = sqlite.engine(path, home)
        self._idle: list[Connection] = []
        self._threaded: list[sqlite.ThreadedConnection] = []
        self._checkpointer = WalCheckpointer(self._engine, path)
        self._writer = Writer(self._engine, self._lock, self._checkpointer)

    @classmethod
    def open(cls, url: str, home: Path | None = None) -> "Store":
        """Open a migrated database. Raises StartupError for a URL that is not served yet.

        `home`: the server's, which paths in rows are relative to; by default the database's directory.
        """
        return cls(sqlite.database(url), home)

    async def close(self) -> None:
        """Finish the writes already accepted, then close every connection."""
        await self._writer.close()
        await self._checkpointer.close()
        while self._idle:
            self._idle.pop().close()
        while self._threaded:
            await self._threaded.pop().close()
        self._lock.close()

    async def write(self, op: Op[T], then: Callable[[], None] | None = None, size: int = 0) -> T:
        """Run `op` in the next group commit, in the writer's thread; return its value after COMMIT.

        `size`: bytes that it writes, if they are many: smaller writes overtake it.
        `then` is called after the commit, in that thread: for what must not wait for a busy loop.
        """
        return await self._writer.write(op, then, size)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Lend a connection that sees one state of the database and must not write: for few, small rows."""
        conn = self._idle.pop() if self._idle else self._engine.connect()
        try:
            with sqlite.transaction(conn):
                yield conn
        finally:
            self._idle.append(conn)

    async def fetch(self, op: Op[T]) -> T:
        """Run `op` on one state of the database, in a thread: for bodies and listings, which may be large."""
        conn = self._threaded.pop() if self._threaded else await sqlite.ThreadedConnection.open(self._engine)
        reading = asyncio.create_task(conn.read(op))
        try:
            return await asyncio.shield(reading)
        finally:  # a cancelled caller gives the connection back only after the thread did
            await asyncio.wait((reading,))
            self._threaded.append(conn)
