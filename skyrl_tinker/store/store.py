"""The store: what API and engine share. Acknowledged means committed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.group_commit import Op, T, Writer
from skyrl_tinker.store.database.write_lock import WriteLock


def once(url: str, op: Op[T]) -> T:
    """One write to a migrated database, which a server may have open. Synchronous; for no running loop."""

    async def run() -> T:
        store = await Store.open(url)
        try:
            return await store.write(op)
        finally:
            await store.close()

    return asyncio.run(run())


class Store:
    """Writes go through one group-commit writer; reads have their own connections and never wait for it."""

    def __init__(self, path: str) -> None:
        """Use `Store.open`."""
        self._turn = WriteLock(path)
        self._writing = sqlite.writing(path, self._turn)
        self._reading = sqlite.reading(path)
        self._idle: list[AsyncConnection] = []
        self._writer = Writer(self._writing)

    @classmethod
    async def open(cls, url: str) -> "Store":
        """Open a migrated database. Raises StartupError for a URL that is not served yet."""
        return cls(sqlite.database(url))

    async def close(self) -> None:
        """Finish the writes already accepted, then close every connection."""
        await self._writer.close()
        while self._idle:
            await self._idle.pop().close()
        self._turn.close()

    async def write(self, op: Op[T], then: Callable[[], None] | None = None) -> T:
        """Run `op(conn)` in the next group commit; return its value after COMMIT.

        The op must await nothing but `conn`: it runs in the writer's thread, with the write lock held.

        `then` is called after the commit, in that thread: for what must not wait for a busy loop.
        """
        return await self._writer.write(op, then)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """For rows: a connection that sees one consistent state of the database and must not write."""
        conn = self._idle.pop() if self._idle else await self._reading.connect()
        try:
            async with sqlite.Transaction(conn):
                yield conn
        finally:
            self._idle.append(conn)

    async def fetch(self, op: Op[T]) -> T:
        """For bodies, which may be large: `op(conn)` reads in a thread, and must await nothing but `conn`."""
        async with self.read() as conn:
            reading = asyncio.create_task(asyncio.to_thread(lambda: sqlite.drive(op(conn))))
            try:
                return await asyncio.shield(reading)
            finally:  # who is cancelled gives the connection back only after the thread did
                await asyncio.wait((reading,))
