"""Group commit: what many callers write at once goes to disk in one transaction."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.store.database.sqlite import Transaction, drive

T = TypeVar("T")
Op = Callable[[AsyncConnection], Coroutine[Any, Any, T]]
"""May be run twice, what it did the first time being undone: so it changes nothing but the database."""

MAX_OPS = 256
MAX_HOLD_S = 0.02
"""Other processes wait for the write lock while a batch holds it."""


@dataclass(slots=True)
class _Write:
    op: Op[Any]
    done: asyncio.Future[Any]
    then: Callable[[], None] | None = None
    value: Any = None
    error: Exception | None = None

    def settle(self, error: Exception | None = None) -> None:
        """Tell the caller, unless it has gone."""
        failure = self.error or error
        if self.done.done():
            return
        if failure is not None:
            self.done.set_exception(_light(failure))
        else:
            self.done.set_result(self.value)


class Writer:
    """One thread, one connection. The ops of one process run in the order in which they came."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._conn: AsyncConnection | None = None
        self._thread = ThreadPoolExecutor(1, "store-writer")
        self._queue: deque[_Write] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._run(), name="store-writer")

    async def write(self, op: Op[T], then: Callable[[], None] | None = None) -> T:
        """Run `op` in the next transaction; return its value once that is on disk.

        `then` is called in the writer's thread the moment it is, since the loop may be busy; an OSError of it
        is passed over.

        What `op` raises is raised here and undoes this op only. If BEGIN or COMMIT fails, every op of the
        batch raises that. An op whose caller is cancelled before it began is left out.
        """
        if self._closed:
            raise _closed()
        write = _Write(op, asyncio.get_running_loop().create_future(), then)
        self._queue.append(write)
        self._arrived.set()
        try:
            result: T = await write.done
        finally:
            del write  # what it raises would hold it, and itself, until a collection that may be far off
        return result

    async def close(self) -> None:
        """Write what was accepted, then stop."""
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
            for left in self._queue:
                left.settle(_closed())

    async def _commit(self) -> None:
        """One transaction, as a whole in the thread: crossing to it costs more than a statement."""
        begun: list[_Write] = []
        error: Exception | None = _closed()  # holds if this task is cancelled
        try:
            await self._on_thread(self._transact, begun)
            error = None
        except Exception as raised:  # of an op that was alone, or of the transaction: all is undone
            error = raised
            if not begun:  # there was no transaction: nobody waits for ever for one
                begun.extend(self._queue)
                self._queue.clear()
        finally:
            for write in begun:
                write.settle(error)

    async def _on_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _transact(self, begun: list[_Write]) -> None:
        """Nearly all ops succeed, so they get SAVEPOINTs, which double the work, only when one failed."""
        if not self._went_well(begun):
            drive(self._apart(begun))
        for write in begun:
            if write.then is not None and write.error is None:
                with suppress(OSError):
                    write.then()

    def _went_well(self, begun: list[_Write]) -> bool:
        """False: an op failed, or the transaction; tried again, one by one, it is known whose that was."""
        try:
            drive(self._together(begun))
        except Exception:
            if len(begun) < 2:
                raise
            return False
        return True

    async def _together(self, begun: list[_Write]) -> None:
        """Run what waits, and what arrives meanwhile. `begun` gets each write before it is run."""
        async with Transaction(self._connected):
            deadline = time.monotonic() + MAX_HOLD_S
            while self._queue and len(begun) < MAX_OPS and time.monotonic() < deadline:
                write = self._queue.popleft()
                if not write.done.done():
                    begun.append(write)
                    write.value = await write.op(self._connected)

    async def _apart(self, begun: list[_Write]) -> None:
        async with Transaction(self._connected):
            for write in begun:
                await _isolated(self._connected, write)

    @property
    def _connected(self) -> AsyncConnection:
        if self._conn is None:
            self._conn = drive(_connect(self._engine))
        return self._conn

    def _disconnect(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            drive(conn.close())


async def _connect(engine: AsyncEngine) -> AsyncConnection:
    return await engine.connect()


async def _isolated(conn: AsyncConnection, write: _Write) -> None:
    try:
        async with conn.begin_nested():
            write.value = await write.op(conn)
    except OperationalError as error:  # disk full, I/O: SQLite may have undone the whole transaction
        write.error = error
        raise
    except Exception as error:  # one op's failure is its own result
        write.error = error


def _light(error: Exception) -> Exception:
    """Without the frames in which it was raised, where its message says all: they hold bodies of requests."""
    return error.with_traceback(None) if isinstance(error, SkyrlTinkerError) else error


def _closed() -> SkyrlTinkerError:
    return SkyrlTinkerError("the store is closed")
