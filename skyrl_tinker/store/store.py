"""Store shared by API and engine. An acknowledged write is on disk."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import Reach
from skyrl_tinker.store.database.abstract_database import Database, LeaseFence
from skyrl_tinker.store.database.group_commit import Later, Op, T, Writer
from skyrl_tinker.store.database.opening import open_database
from skyrl_tinker.system.turns import Turns

RETRY_S = 1.0
_log = logging.getLogger(__name__)


THREADS, REPORT_THREADS = 4, 2
IDLE_S = 60.0
"""Time after which a connection that nobody uses is closed."""


class ReadPool:
    """A few threads, each with a connection while it reads; further reads wait for their turn."""

    def __init__(self, database: Database, name: str, threads: int = THREADS) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(threads, name)
        self._idle: deque[tuple[float, Connection]] = deque()  # since when; the oldest first
        self._closer: asyncio.TimerHandle | None = None

    async def run(self, op: Callable[[Connection], T]) -> T:
        """Run `op` on one state of the database, in a thread, also to its end if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self.run_here, op)
        finally:
            if self._closer is None:
                self._closer = loop.call_later(IDLE_S, self._close_idle)

    def run_here(self, op: Callable[[Connection], T]) -> T:
        """Run `op` in the calling thread."""
        try:
            _, conn = self._idle.pop()
        except IndexError:
            conn = self._database.connect()
        try:
            with self._database.reading(conn):
                return op(conn)
        finally:
            if self._database.usable(conn):
                self._idle.append((time.monotonic(), conn))
            else:
                self._database.release(conn)

    async def close(self) -> None:
        """Finish the reads already accepted, then close every connection."""
        if self._closer is not None:
            self._closer.cancel()
        await asyncio.to_thread(self._threads.shutdown)
        self._release_until(float("inf"))

    def _close_idle(self) -> None:
        loop, self._closer = asyncio.get_running_loop(), None
        loop.run_in_executor(self._threads, self._release_until, time.monotonic() - IDLE_S)
        if self._idle:
            self._closer = loop.call_later(IDLE_S, self._close_idle)

    def _release_until(self, moment: float) -> None:
        """Close the connections that nobody has used since."""
        with suppress(IndexError):  # there are no others
            while True:
                since, conn = self._idle.popleft()
                if since > moment:
                    self._idle.appendleft((since, conn))
                    return
                self._database.release(conn)


def write_once(url: str, op: Op[T], home: Path | None = None) -> T:
    """Commit one write to a migrated database, which a server may have open, and return its value."""
    with closing(open_database(url, home)) as database, database.connect() as conn, database.writing(conn):
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
        self._reports = ReadPool(
            database, "store-reports", REPORT_THREADS
        )  # apart, too: no result waits for one
        self._report_turns = Turns()  # of each owner, so that no other waits for several
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
        await self._reports.close()
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
        """Run `op` on one state of the database, in a thread: for bodies, which may be large."""
        return await self._bulk.run(op)

    async def report(self, op: Op[T], reach: Reach) -> T:
        """Run `op` likewise: for lists and reports, which clients can make slow. `fetch` waits for none.

        Of each `reach` one runs at a time, also to its end if the client leaves; a server without keys has
        but one owner, whose reports take all threads.
        """
        read = partial(self._reports.run, op)
        return await (read() if reach is None else self._report_turns.run(reach, read))
