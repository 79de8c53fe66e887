"""Saves in progress: those that need the ranks, for which a recovery waits, and those with files here."""

import asyncio


class PendingWrites:
    def __init__(self) -> None:
        self._on_ranks: set[int] = set()  # by future id
        self._here: set[int] = set()  # to be stored, answered or loaded by samplers
        self._changed = asyncio.Event()

    def begin(self, future_id: int) -> None:
        self._on_ranks.add(future_id)

    def note_here(self, future_id: int) -> None:
        """Record that a save needs the ranks no more: its files are on this host."""
        if future_id in self._on_ranks:
            self._on_ranks.discard(future_id)
            self._here.add(future_id)
            self._changed.set()

    def end(self, future_id: int) -> None:
        self._on_ranks.discard(future_id)
        self._here.discard(future_id)
        self._changed.set()

    def is_here(self, future_id: int) -> bool:
        """Return whether a save goes on without the ranks: a replay need not repeat it."""
        return future_id in self._here

    async def settle(self) -> None:
        """Wait until no save needs the ranks."""
        while self._on_ranks:
            self._changed.clear()
            await self._changed.wait()
