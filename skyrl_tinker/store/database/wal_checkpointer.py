"""Checkpoints of the write-ahead log: commits are copied into the database file beside the writers."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.write_lock import WriteLock

EVERY_BYTES = 4 * MiB
SMALL_WRITE_BYTES = 32 * 1024
"""Estimate of the log's growth by a write that names no size."""
LONG_LOG_BYTES = 32 * MiB
_PAGE_BYTES = 4096
_log = logging.getLogger(__name__)


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
