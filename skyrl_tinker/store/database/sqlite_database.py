"""SQLite behind the port that it shares with PostgreSQL."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.abstract_database import Database

EVERY_BYTES = 4 * MiB
SMALL_WRITE_BYTES = 32 * 1024
"""Estimate of the log's growth by a write that names no size."""
LONG_LOG_BYTES = 32 * MiB
_PAGE_BYTES = 4096
_log = logging.getLogger(__name__)


class WriteLock:
    """Lock of one database file, as a context manager. Taking it blocks: only for a thread of its own.

    SQLite lets waiting writers sleep and try again, up to 100 ms at a time, so that a busy process starves
    others for seconds. A file lock wakes the next writer as the transaction ends, and dies with its process.
    """

    def __init__(self, database: str) -> None:
        # held until `close`; as private as the database
        self._file = os.fdopen(
            os.open(f"{database}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab"
        )

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()


class WalCheckpointer:
    """One thread with one connection, for the writes of this process.

    SQLite's own checkpoints run inside a COMMIT, under the lock for which the writers of all processes wait.
    """

    def __init__(self, engine: Engine, path: str) -> None:
        """`path`: of the database file."""
        self._engine = engine
        self._lock = WriteLock(path)  # with a descriptor of its own: a lock of this process would be shared
        self._conn: Connection | None = None
        self._thread = ThreadPoolExecutor(1, "store-checkpointer")
        self._running: asyncio.Future[None] | None = None
        self._written = 0

    def note(self, size: int) -> None:
        """Count a write that was committed, and start a checkpoint when there is enough to copy."""
        self._written += max(size, SMALL_WRITE_BYTES)
        if self._written >= EVERY_BYTES and (self._running is None or self._running.done()):
            self._written = 0
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._checkpoint)

    async def close(self) -> None:
        """Finish the checkpoint that runs."""
        if self._running is not None:
            await self._running
        if self._conn is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._conn.close)
        self._thread.shutdown(wait=False)
        self._lock.close()

    def _checkpoint(self) -> None:
        try:
            if self._copy() > LONG_LOG_BYTES:
                # The log begins anew only once a checkpoint has copied all: nobody may write meanwhile.
                with self._lock:
                    self._copy()
        except OperationalError as error:  # a full disk: the next one copies more
            _log.warning("the database's log could not be copied: %s", error)

    def _copy(self) -> int:
        """Copy the pages that no reader holds back; return the bytes of the log."""
        if self._conn is None:
            self._conn = self._engine.connect()
        with closing(sqlite.execute(self._conn, "PRAGMA wal_checkpoint(PASSIVE)")) as cursor:
            _, pages, _ = cursor.fetchone()
        return int(pages) * _PAGE_BYTES


class SqliteDatabase(Database):
    """File with its writers' lock, and checkpoints of its log beside the writers."""

    local = True

    def __init__(self, path: str, home: Path | None = None) -> None:
        """`home`: base of relative `file_paths`, by default the database's directory."""
        self.engine = sqlite.engine(path, home)
        self._path = path
        self._lock = WriteLock(path)
        self._checkpointer: WalCheckpointer | None = None

    def reading(self, conn: Connection) -> AbstractContextManager[None]:
        return sqlite.transaction(conn)

    @contextmanager
    def _writing(self, conn: Connection) -> Iterator[None]:
        with self._lock, sqlite.transaction(conn, sqlite.BEGIN_WRITE):
            yield

    def writer(self) -> Connection:
        """Connect without SQLite's own checkpoints, which run inside a COMMIT."""
        conn = self.connect()
        sqlite.execute(conn, "PRAGMA wal_autocheckpoint = 0")
        return conn

    def written(self, size: int) -> None:
        if self._checkpointer is None:
            self._checkpointer = WalCheckpointer(self.engine, self._path)
        self._checkpointer.note(size)

    async def settle(self) -> None:
        if self._checkpointer is not None:
            await self._checkpointer.close()

    def close(self) -> None:
        self._lock.close()
