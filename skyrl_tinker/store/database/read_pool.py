"""Reads in a few threads, so that the loop does not wait for them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import Connection

from skyrl_tinker.store.database.abstract_database import Database

THREADS = 4
IDLE_S = 60.0
"""Time after which a connection that nobody uses is closed."""

T = TypeVar("T")


class ReadPool:
    """Threads, at most THREADS, each with a connection while it reads; further reads wait for their turn."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(THREADS, name)
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
