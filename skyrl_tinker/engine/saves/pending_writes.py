"""Writes in progress: those that need the ranks, for which a recovery waits, and those with files here."""

import asyncio


class PendingWrites:
    def __init__(self) -> None:
        self._on_ranks: set[int] = set()  # by the id of its future, or a number of its own
        self._here: set[int] = set()  # to be stored, answered or loaded by samplers
        self._changed = asyncio.Event()

    def begin(self, number: int) -> None:
        self._on_ranks.add(number)

    def note_here(self, number: int) -> None:
        """Record that a write needs the ranks no more: its files are on this host."""
        if number in self._on_ranks:
            self._on_ranks.discard(number)
            self._here.add(number)
            self._changed.set()

    def end(self, number: int) -> None:
        self._on_ranks.discard(number)
        self._here.discard(number)
        self._changed.set()

    def is_here(self, number: int) -> bool:
        """Return whether a save goes on without the ranks: a replay need not repeat it."""
        return number in self._here

    async def settle(self) -> None:
        """Wait until no write needs the ranks."""
        while self._on_ranks:
            self._changed.clear()
            await self._changed.wait()
