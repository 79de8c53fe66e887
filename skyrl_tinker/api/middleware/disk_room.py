"""Room on the disks. New work is refused while one is nearly full.

Accepted requests need the rest: results, checkpoints, snapshots. The SDK tries a 503 again by itself.
"""

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import starmap
from pathlib import Path

from skyrl_tinker.directories import free_bytes
from skyrl_tinker.domain.units import GB
from skyrl_tinker.errors import NoRoomError

LOOK_S = 1.0
PATIENCE_S = 1.0
"""Longest wait of a request for a file system's answer."""
RETRY_S = 10


class DiskRoom:
    """Free bytes of some directories, looked at in a thread: a file system that is away answers nothing."""

    def __init__(self, directories: Iterable[Path], min_free_gb: float) -> None:
        self._directories = tuple(directories)
        self.least_bytes = min_free_gb * GB
        self._looked_at = 0.0
        self._looking: asyncio.Future[None] | None = None
        self._shortage: str | None = None
        self.free_bytes = math.inf
        """Free on the disk with the least room, as of the last look."""

    async def require(self) -> None:
        """Raise NoRoomError while a disk has too little room."""
        if why := await self.shortage():
            raise NoRoomError(why, RETRY_S)

    async def shortage(self) -> str | None:
        """Return which disk has too little room, with the numbers; None: all have enough.

        While one does not answer, or with an error, as of the last look.
        """
        now = time.monotonic()
        if self._looking is None or (self._looking.done() and now - self._looked_at > LOOK_S):
            self._looked_at = now
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))
            await asyncio.wait((self._looking,), timeout=PATIENCE_S)
        if self._looking.done():
            self._looking.result()
        return self._shortage

    def _look(self) -> None:
        with suppress(OSError):  # as of one behind a network: it says as little as one that is away
            free = {directory: free_bytes(directory) for directory in self._directories}
            self.free_bytes = min(free.values())
            self._shortage = next(filter(None, starmap(self._describe, free.items())), None)

    def _describe(self, directory: Path, free: int) -> str | None:
        if free >= self.least_bytes:
            return None
        return (
            f"{free / GB:.2f} GB are free at {directory}, and new work needs {self.least_bytes / GB:g} GB "
            "(setting min_free_gb): accepted requests go on, send this again once there is room"
        )
