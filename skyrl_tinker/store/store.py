"""Store shared by API and engine. An acknowledged write is on disk."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError

from skyrl_tinker.store.database.abstract_database import Database, LeaseFence
from skyrl_tinker.store.database.group_commit import Later, Op, T, Writer
from skyrl_tinker.store.database.opening import open_database
from skyrl_tinker.store.database.read_pool import ReadPool

RETRY_S = 1.0
_log = logging.getLogger(__name__)


def write_once(url: str, op: Op[T], home: Path | None = None) -> T:
    """Commit one write to a migrated database, which a server may have open, and return its value."""
    with (
        closing(open_database(url, home)) as database,
        database.connect() as conn,
        database.writing(conn),
    ):
        return op(conn)


class Store:
    """Group commits in a thread, reads in a few; those of a file's rows on the loop.

    Statements are plain functions of a connection. Readers never wait for the writer.
    """

    def __init__(self, database: Database) -> None:
        """Use `Store.open`."""
        self._database = database
        self._rows = ReadPool(database, "store-rows")  # apart: no listing delays the reads of a few rows
        self._bulk = ReadPool(database, "store-bulk")
        self._writer = Writer(database)

    @classmethod
    def open(cls, url: str, home: Path | None = None, fence: LeaseFence | None = None) -> "Store":
        """Open a migrated database. Raises StartupError for a URL that names none that is served.

        `home`: the server's, which paths in rows are relative to; by default the directory of SQLite's file.
        `fence`: guard that bars the writes of a server that another one has replaced.
        """
        return cls(open_database(url, home, fence))

    def now(self) -> float:
        """Return the seconds since the epoch by the database's clock, which times in rows are of."""
        return time.time() + self._database.skew_s

    async def wait_until_there(self) -> None:
        """Return once the database answers: it may be away when a process starts."""
        while True:
            try:
                return await self.read(lambda _: None)
            except OperationalError as error:
                _log.warning("the database does not answer, trying again in %.0f s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Finish the writes already accepted, then close every connection."""
        await self._writer.close()
        await self._rows.close()
        await self._bulk.close()
        await self._database.settle()
        self._database.close()

    def write(
        self, op: Op[T] | Op[Later[T]], then: Callable[[], None] | None = None, size: int = 0
    ) -> Coroutine[Any, Any, T]:
        """Run `op` in the next group commit, in the writer's thread; return its value after COMMIT.

        `size`: bytes that it writes, if they are many: smaller writes overtake it.
        `then` is called after the commit, in that thread: for work that must not wait for a busy loop. Once
        for all that are committed together with the same.
        """
        return self._writer.write(op, then, size)

    async def read(self, op: Op[T]) -> T:
        """Run `op` on one state of the database: for few, small rows. It may suspend the caller, or not.

        A file is read on the loop, in less time than a thread takes to begin.
        """
        return self._rows.run_here(op) if self._database.local else await self._rows.run(op)

    async def fetch(self, op: Op[T]) -> T:
        """Run `op` on one state of the database, in a thread: for bodies and listings, which may be large."""
        return await self._bulk.run(op)
