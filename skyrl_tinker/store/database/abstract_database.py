"""A database as the store uses it: connections of SQLAlchemy, and transactions begun explicitly.

A connection runs each transaction as a whole in one thread: a read of a few rows in the caller's, a large one
in a thread of its own. SQLAlchemy's AsyncEngine crosses to that thread at least five times a transaction,
which takes longer than most statements: 0.6 ms for one row of SQLite's against 0.2.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import orjson
from sqlalchemy import Connection, Engine


class Fence:
    """Bar to a second server on one database; to that of a file, the lock of its home is one."""

    def take(self) -> None:
        """Take it, or see that it is held still. Blocks. Raises StartupError if another server has it."""

    def close(self) -> None:
        """Let it go."""


class Database(ABC):
    """Database of either kind. All its methods raise SQLAlchemy's OperationalError."""

    engine: Engine

    def connect(self) -> Connection:
        """Connect. One connection serves one transaction at a time."""
        return self.engine.connect()

    @abstractmethod
    def reading(self, conn: Connection) -> AbstractContextManager[None]:
        """Run a transaction that sees one state of the database."""

    @abstractmethod
    def writing(self, conn: Connection) -> AbstractContextManager[None]:
        """Run a transaction behind those of all other writers; what it commits is durable.

        So ids are in the order of commits. What is raised within it undoes it.
        """

    def writer(self) -> Connection:
        """Connect for a Writer, which calls `written`."""
        return self.connect()

    @abstractmethod
    def written(self, size: int) -> None:
        """Take note of bytes that a Writer has committed."""

    def usable(self, conn: Connection) -> bool:
        """Return whether a connection can run another transaction."""
        return True

    def release(self, conn: Connection) -> None:
        """Close a connection, which may be broken."""
        conn.close()

    def fence(self) -> Fence:
        return Fence()

    @abstractmethod
    async def settle(self) -> None:
        """Finish what `written` has begun."""

    @abstractmethod
    def close(self) -> None:
        """Close what is not a connection; those are closed by their users."""


def json_text(value: object) -> str:
    """Return the text that is stored in JSON columns."""
    return orjson.dumps(value).decode()
