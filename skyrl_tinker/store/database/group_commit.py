"""Group commit: writes of many callers go to disk in one transaction."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.store.database.abstract_database import Database, dropping_undone, is_of_statement

T = TypeVar("T")
Op = Callable[[Connection], T]
"""May run twice, its first run being undone: it changes nothing but the database, and logs `after_commit`."""


class Later(Generic[T]):
    """Value of an op that is known once the database has answered the op's statements.

    Ops of one transaction send first, and read then: all of them wait for the answers once.
    """

    __slots__ = ("value",)

    def __init__(self, value: Callable[[], T]) -> None:
        """`value`: waits for the value; called once, within the transaction, perhaps after other ops."""
        self.value = value


MAX_OPS = 256
MAX_HOLD_S, MAX_BYTES = 0.02, 4 * 1024**2
"""Other processes wait for the write lock while a batch holds it, also while it sends bytes at its end."""
LARGE_BYTES = 256 * 1024
OVERTAKEN = 16
"""Small writes that run before a large one which waits: large bodies delay nobody else's requests."""


@dataclass(slots=True)
class _Write:
    op: Op[Any]
    done: asyncio.Future[Any]
    then: Callable[[], None] | None = None
    size: int = 0
    value: Any = None
    error: Exception | None = None

    def settle(self, error: Exception | None = None) -> None:
        """Give the caller its value or its error, unless it was cancelled."""
        failure = self.error or error
        if self.done.done():
            return
        if failure is not None:
            self.done.set_exception(_without_frames(failure))
        else:
            self.done.set_result(self.value)


class _Queue:
    """Waiting writes, in order but for large ones, which small ones overtake."""

    def __init__(self) -> None:
        self._small: deque[_Write] = deque()
        self._large: deque[_Write] = deque()
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    def add(self, write: _Write) -> None:
        (self._large if write.size > LARGE_BYTES else self._small).append(write)

    @property
    def next_size(self) -> int:
        return self._next()[0].size

    def pop(self) -> _Write:
        """Remove and return the next write. There must be one."""
        queue = self._next()
        self._overtaken = self._overtaken + bool(self._large) if queue is self._small else 0
        return queue.popleft()

    def _next(self) -> deque[_Write]:
        first = self._small and (self._overtaken < OVERTAKEN or not self._large)
        return self._small if first else self._large


class Writer:
    """One thread with one connection. Ops of one process run in order, but small ones overtake large ones."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._conn: Connection | None = None
        self._thread = ThreadPoolExecutor(1, "store-writer")
        self._queue = _Queue()
        self._arrived = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._run(), name="store-writer")

    async def write(
        self, op: Op[T] | Op[Later[T]], then: Callable[[], None] | None = None, size: int = 0
    ) -> T:
        """Run `op`, which writes `size` bytes, in the next transaction; return its value once it is on disk.

        `then` is called in the writer's thread right after the commit, since the loop may be busy, once for
        all ops of the commit that have the same; an OSError of it is ignored.

        An exception of `op` is raised here and undoes this op only. If BEGIN or COMMIT fails, every op of the
        batch raises that. An op whose caller is cancelled before it began is left out.
        """
        if self._closed:
            raise _closed()
        write = _Write(op, asyncio.get_running_loop().create_future(), then, size)
        self._queue.add(write)
        self._arrived.set()
        try:
            result: T = await write.done
        finally:
            del write  # its error would hold it, and itself, until a collection that may be far off
        return result

    async def close(self) -> None:
        """Finish the writes already accepted, then stop."""
        self._closed = True
        self._arrived.set()
        await self._task

    async def _run(self) -> None:
        try:
            while self._queue or not self._closed:
                if self._queue:
                    await self._commit()
                else:
                    self._arrived.clear()
                    await self._arrived.wait()
            await self._on_thread(self._disconnect)
        finally:  # nothing is left here unless this task itself is cancelled
            self._closed = True
            self._thread.shutdown(wait=False)
            while self._queue:
                self._queue.pop().settle(_closed())

    async def _commit(self) -> None:
        """Run one transaction, as a whole in the thread: crossing to it costs more than a statement."""
        begun: list[_Write] = []
        error: Exception | None = _closed()  # holds if this task is cancelled
        try:
            await self._on_thread(self._transact, begun)
            error = None
        except Exception as raised:  # of an op that was alone, or of the transaction: all is undone
            error = raised
            if not begun:  # no transaction began: no caller may wait for one indefinitely
                while self._queue:
                    begun.append(self._queue.pop())
        finally:
            for write in begun:
                write.settle(error)
                self._database.written(write.size)

    async def _on_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _transact(self, begun: list[_Write]) -> None:
        """Commit the batch. Nearly all ops succeed, so SAVEPOINTs, at twice the cost, are for a retry."""
        if not self._run_together(begun):
            with self._transaction() as conn:
                for write in begun:
                    self._run_isolated(conn, write)
        calls = [write.then for write in begun if write.then is not None and write.error is None]
        for call in dict.fromkeys(calls):
            with suppress(OSError):
                call()

    def _run_together(self, begun: list[_Write]) -> bool:
        """Run the ops that wait or arrive meanwhile. `begun` gets each write before its op runs.

        Returns False if one of several ops, or their transaction, failed: run apart, each gets its own error.
        """
        try:
            with self._transaction() as conn:
                deadline, left = time.monotonic() + MAX_HOLD_S, MAX_BYTES
                while self._queue and len(begun) < MAX_OPS and time.monotonic() < deadline:
                    if begun and self._queue.next_size > left:
                        break
                    write = self._queue.pop()
                    if not write.done.done():
                        begun.append(write)
                        write.value = write.op(conn)
                        left -= write.size
                for write in begun:
                    write.value = _known(write.value)
        except Exception:  # all is undone, and each op runs again by itself
            if len(begun) < 2:
                raise
            return False
        return True

    def _run_isolated(self, conn: Connection, write: _Write) -> None:
        try:
            with dropping_undone(conn), conn.begin_nested(), self._database.sending(conn):
                write.value = _known(write.op(conn))
        except Exception as error:  # one op's failure is its own result
            write.error = error
            if isinstance(error, OperationalError) and not is_of_statement(error):
                raise  # disk full, I/O, a cut connection: all may be undone

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if self._conn is not None and not self._database.usable(self._conn):
            self._disconnect()
        if self._conn is None:
            self._conn = self._database.writer()
        with self._database.writing(self._conn):
            yield self._conn

    def _disconnect(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            self._database.release(conn)


def _known(value: Any) -> Any:
    return value.value() if isinstance(value, Later) else value


def _without_frames(error: Exception) -> Exception:
    """Drop the traceback, which holds bodies of requests, where the message says all."""
    return error.with_traceback(None) if isinstance(error, SkyrlTinkerError) else error


def _closed() -> SkyrlTinkerError:
    return SkyrlTinkerError("the store is closed")
