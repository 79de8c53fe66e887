"""A database as the store uses it: connections of SQLAlchemy, and transactions begun explicitly.

A connection runs each transaction as a whole in one thread. SQLAlchemy's AsyncEngine changes threads at least
five times a transaction, which takes longer than most statements: 0.6 ms for one row of SQLite's against 0.2.
"""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import LeaseLostError

Call = Callable[[], object]
_CALLS = "after_commit"
"""Key of the calls of a connection's transaction, in its `info`."""
SKEW = "skew_s"
"""Where a connection keeps by how much the database's clock is ahead of this host's."""


@dataclass(frozen=True, slots=True)
class LeaseFence:
    """Bar to commits of a server whose lease has ended.

    `end` is called with the reason where one would be made, and where nobody can know whether one was made.
    """

    epoch: int
    end: Callable[[str], None] = lambda _: None

    def check(self, row: Sequence[Any] | None) -> None:
        """Raise LeaseLostError unless the epoch that the database has, in a row, is that of the lease."""
        if row is None or row[0] != self.epoch:
            self.end("another server has taken over the database")
            raise LeaseLostError("database_url: another server has taken over")


def after_commit(conn: Connection, call: Call) -> None:
    """Have it called once the write that runs is on disk, by the thread that wrote; never if it is undone."""
    conn.info[_CALLS].append(call)


@contextmanager
def dropping_undone(conn: Connection) -> Iterator[None]:
    """Context of a part that is undone if it raises: then its calls are dropped."""
    calls: list[Call] = conn.info[_CALLS]
    before = len(calls)
    try:
        yield
    except BaseException:  # whatever it is, the part is undone
        del calls[before:]
        raise


class Database(ABC):
    """Database of either kind. All its methods raise SQLAlchemy's OperationalError."""

    engine: Engine
    local: ClassVar[bool]
    """A read of a few rows is faster than a change of threads, and waits for nobody."""
    skew_s = 0.0
    """By how much its clock is ahead of this host's, as the last transaction found."""

    def connect(self) -> Connection:
        """Connect. One connection serves one transaction at a time."""
        return self.engine.connect()

    @abstractmethod
    def reading(self, conn: Connection) -> AbstractContextManager[None]:
        """Run a transaction that sees one state of the database."""

    @contextmanager
    def writing(self, conn: Connection) -> Iterator[None]:
        """Run a transaction behind those of all other writers; its commit is durable.

        So ids are in the order of commits. An exception within it undoes it.
        """
        calls: list[Call] = []
        with self._writing(conn):
            conn.info[_CALLS] = calls  # now: a connection that was cut is replaced as it begins
            yield
        for call in calls:
            call()

    @abstractmethod
    def _writing(self, conn: Connection) -> AbstractContextManager[None]:
        """Begin, then commit, or roll back on an exception in between."""

    def writer(self) -> Connection:
        """Connect for a Writer, which calls `written`."""
        return self.connect()

    def written(self, size: int) -> None:
        """Take note of bytes that a Writer has committed; a server keeps its own log."""
        return

    def sending(self, conn: Connection) -> AbstractContextManager[None]:
        """Run a part of a transaction; at its end its statements are answered, or the first error raised."""
        return nullcontext()

    def usable(self, conn: Connection) -> bool:
        """Return whether a connection can run another transaction."""
        return True

    def release(self, conn: Connection) -> None:
        """Close a connection, which may be broken."""
        conn.close()

    async def settle(self) -> None:
        """Finish the work that `written` has begun."""
        return

    def close(self) -> None:
        """Close everything but connections; those are closed by their users."""
        return


def is_of_statement(error: OperationalError) -> bool:
    """Return whether a statement has failed, and would elsewhere: it is too slow, too large or wrong.

    Else it is the database, which may be away, full, or locked by somebody, and serves it later.
    """
    state = getattr(error.orig, "sqlstate", None) or ""  # 57014: query_canceled, 54…: program_limit_exceeded
    return (
        state == "57014"
        or state.startswith("54")
        or getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    )


def json_text(value: object) -> str:
    """Return the text that is stored in JSON columns."""
    return orjson.dumps(value).decode()
