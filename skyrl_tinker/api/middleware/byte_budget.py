"""Memory that many requests share, in bytes."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Share:
    """What one request holds of a budget."""

    size: int


class ByteBudget:
    """At most `total` bytes are held at once. Who asks for more than is left waits, first come, first served;
    who asks for more than there is waits until nobody else holds any."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._left = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def holding(self, size: int) -> AsyncIterator[Share]:
        """What of the share is given back earlier (`shrink`) others may have at once."""
        share = Share(min(size, self._total))
        await self._take(share.size)
        try:
            yield share
        finally:
            self.shrink(share, 0)

    def shrink(self, share: Share, size: int) -> None:
        """Hold only `size` bytes from now on; a share never grows."""
        size = min(size, share.size)
        self._left += share.size - size
        share.size = size
        self._serve()

    async def _take(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had its turn already
                self._left += size
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self._left:
                    return
                self._left -= size
                turn.set_result(None)
            self._waiting.popleft()
