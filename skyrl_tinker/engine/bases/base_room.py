"""Room of base models on demand, which each takes while it runs: one that has been idle stops for another."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from skyrl_tinker.domain.units import GB, counted

ROOM_CHECK_S = 1.0
"""Time between two checks who is idle, while a base model waits."""


in_gpus = partial(counted, noun="GPU")


def in_memory(size: int) -> str:
    return f"{size / GB:.1f} GB of memory"


class BaseRoom:
    def __init__(
        self, size: int = 0, needs: Mapping[str, int] | None = None, told: Callable[[int], str] = in_gpus
    ) -> None:
        """`size`: GPUs, or bytes of memory, that base models leave which always run.

        `needs`: of each on demand, by name. `told`: words for so many.
        """
        self._size = size
        self._needs = needs or {}
        self._told = told
        self._idle: dict[str, Callable[[], float]] = {}  # of those that are in it
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._wanted: str | None = None
        self._first = ""  # of those that wait

    def wants(self, name: str) -> bool:
        """Return whether another base model waits for the room of this one."""
        return self._wanted == name

    async def enter(
        self,
        name: str,
        idle_s: Callable[[], float],
        waits: Callable[[str], Awaitable[None]],
        needed: Callable[[], bool],
    ) -> bool:
        """Take the room of a base model; where it lacks, wait until others have left, one after another.

        The one longest idle is wanted: it may stop. `idle_s`: of this one, from now on. `waits` gets the
        reason of the wait, at each check. Returns False without it once it is not `needed` any more.
        """
        if self._turn.locked():
            await waits(f"it waits behind {self._first}, for which room lacks")
        async with self._turn:
            self._first = name
            try:
                while needed():
                    if not self._lacks(name):
                        self._idle[name] = idle_s
                        return True
                    self._freed.clear()
                    self._wanted = max(self._holders(), key=lambda each: self._idle[each]())
                    held = ", ".join(self._holders())
                    await waits(f"it waits for {self._told(self._needs[name])} of {held}")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ROOM_CHECK_S):
                            await self._freed.wait()
                return False
            finally:
                self._wanted = None

    def leave(self, name: str) -> None:
        """Give back what a base model holds, if it does."""
        self._idle.pop(name, None)
        self._freed.set()

    def _holders(self) -> list[str]:
        return [name for name in self._idle if self._needs.get(name, 0)]

    def _lacks(self, name: str) -> bool:
        """Return whether room lacks that others hold."""
        held = sum(self._needs.get(each, 0) for each in self._idle)
        return bool(self._holders()) and self._needs.get(name, 0) > self._size - held
