"""Turns of those that share something which nobody can take back once it has begun."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Turns:
    """Work of which each key has one piece at a time, or so many, in the order of arrival.

    It goes on if its caller gives up, as a thread or another process does. So does its turn.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._locks: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work in a turn of `key` and return its result; not begun once its caller gave up."""
        lock = self._locks.setdefault(key, asyncio.Semaphore(self._at_once))
        await lock.acquire()
        running = asyncio.create_task(work())
        self._running.add(running)
        running.add_done_callback(partial(self._end, lock))
        return await asyncio.shield(running)

    def _end(self, lock: asyncio.Semaphore, ended: asyncio.Task[Any]) -> None:
        self._running.discard(ended)
        if not ended.cancelled():
            ended.exception()  # its caller may have given up
        lock.release()
