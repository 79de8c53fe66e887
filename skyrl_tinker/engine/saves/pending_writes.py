"""Saves under way: those that need the ranks, for which a recovery waits, and those whose files are here."""

import asyncio


class PendingWrites:
    def __init__(self) -> None:
        self._on_ranks: set[int] = set()  # by future id
        self._here: set[int] = set()  # to be stored, answered or brought to the samplers
        self._changed = asyncio.Event()

    def begin(self, future_id: int) -> None:
        self._on_ranks.add(future_id)

    def note_here(self, future_id: int) -> None:
        """Note that all that a save needs of the ranks is in files of this host."""
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
