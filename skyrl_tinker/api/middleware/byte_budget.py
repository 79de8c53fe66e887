"""Memory budget in bytes, shared by concurrent requests."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Share:
    """Bytes of the budget that one request holds."""

    size: int


class ByteBudget:
    """Budget of `total` bytes, granted first come, first served.

    A request for more than is left waits; one for more than `total` waits until it is the only holder.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._left = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def holding(self, size: int) -> AsyncIterator[Share]:
        """Hold `size` bytes inside the context; `shrink` gives a part back earlier."""
        share = Share(min(size, self._total))
        await self._acquire(share.size)
        try:
            yield share
        finally:
            self.shrink(share, 0)

    def shrink(self, share: Share, size: int) -> None:
        """Reduce the share to `size` bytes; it never grows."""
        size = min(size, share.size)
        self._left += share.size - size
        share.size = size
        self._grant()

    async def _acquire(self, size: int) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._left += size
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting:
            size, granted = self._waiting[0]
            if not granted.cancelled():
                if size > self._left:
                    return
                self._left -= size
                granted.set_result(None)
            self._waiting.popleft()
