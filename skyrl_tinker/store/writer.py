"""Group commit: what many callers write at once goes to disk in one transaction."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from skyrl_tinker.errors import SkyrlTinkerError

T = TypeVar("T")
Op = Callable[[AsyncConnection], Awaitable[T]]

MAX_OPS = 256
MAX_HOLD_S = 0.02
"""Other processes wait for the write lock while a batch holds it."""


@dataclass(slots=True)
class _Write:
    op: Op[Any]
    done: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None

    def settle(self, error: Exception | None = None) -> None:
        """Tell the caller, unless it has gone."""
        failure = self.error or error
        if self.done.done():
            return
        if failure is not None:
            self.done.set_exception(failure)
        else:
            self.done.set_result(self.value)


class Writer:
    """One task, one connection. The ops of one process run in the order in which they came."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._queue: asyncio.Queue[_Write | None] = asyncio.Queue()
        self._closed = False
        self._task = asyncio.create_task(self._run(), name="store-writer")

    async def write(self, op: Op[T]) -> T:
        """Run `op` in the next transaction; return its value once that is on disk.

        What `op` raises is raised here and undoes this op only. If BEGIN or COMMIT fails, every op of the
        batch raises that. An op whose caller is cancelled before it began is left out.
        """
        if self._closed:
            raise _closed()
        write = _Write(op, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(write)
        result: T = await write.done
        return result

    async def close(self) -> None:
        """Write what was accepted, then stop."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)
        await self._task

    async def _run(self) -> None:
        try:
            while (first := await self._queue.get()) is not None:
                if not first.done.done():
                    await self._commit(first)
        finally:  # nothing is left here unless this task itself is cancelled
            self._closed = True
            while (left := self._next()) is not None:
                left.settle(_closed())

    async def _commit(self, first: _Write) -> None:
        batch = [first]
        error: Exception | None = _closed()  # holds if this task is cancelled
        try:
            await self._transact(first, batch)
            error = None
        except Exception as raised:  # of `first`, then alone, or of the transaction: all is undone
            error = raised
        finally:
            for write in batch:
                write.settle(error)

    async def _transact(self, first: _Write, batch: list[_Write]) -> None:
        """Run `first` and what has arrived meanwhile in one transaction.

        `first` needs no SAVEPOINT: if it fails, the transaction holds nothing else yet.
        """
        loop = asyncio.get_running_loop()
        async with self._engine.begin() as conn:
            deadline = loop.time() + MAX_HOLD_S
            first.value = await first.op(conn)
            while len(batch) < MAX_OPS and loop.time() < deadline:
                if (write := self._next()) is None:
                    return
                batch.append(write)
                if not write.done.done():
                    await _isolated(conn, write)

    def _next(self) -> _Write | None:
        """The next op without waiting. The end mark stays in the queue, for `_run`."""
        if self._queue.empty():
            return None
        write = self._queue.get_nowait()
        if write is None:
            self._queue.put_nowait(None)
        return write


async def _isolated(conn: AsyncConnection, write: _Write) -> None:
    try:
        async with conn.begin_nested():
            write.value = await write.op(conn)
    except OperationalError as error:  # disk full, I/O: SQLite may have undone the whole transaction
        write.error = error
        raise
    except Exception as error:  # one op's failure is its own result
        write.error = error


def _closed() -> SkyrlTinkerError:
    return SkyrlTinkerError("the store is closed")
