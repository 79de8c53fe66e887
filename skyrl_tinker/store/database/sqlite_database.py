"""SQLite behind the port that it shares with PostgreSQL."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.abstract_database import Database
from skyrl_tinker.store.database.wal_checkpointer import WalCheckpointer
from skyrl_tinker.store.database.write_lock import WriteLock


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
