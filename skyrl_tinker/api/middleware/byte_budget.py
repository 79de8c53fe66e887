"""Memory budget in bytes, shared by the requests of all owners."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_tinker.domain.ids import OwnerId


@dataclass(slots=True)
class Share:
    """Bytes of the budget that one request holds."""

    size: int


class ByteBudget:
    """Budget of `total` bytes, granted to the owners in turn, and within each first come, first served.

    A request for more than is left waits; one for more than `total` waits until it is the only holder.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._left = total
        self._waiting: OrderedDict[OwnerId | None, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def holding(self, size: int, owner: OwnerId | None) -> AsyncIterator[Share]:
        """Hold `size` bytes inside the context; `shrink` gives a part back earlier."""
        share = Share(min(size, self._total))
        await self._acquire(share.size, owner)
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

    async def _acquire(self, size: int, owner: OwnerId | None) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size, granted))
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
            owner, queue = next(iter(self._waiting.items()))
            size, granted = queue[0]
            if not granted.cancelled():
                if size > self._left:
                    return
                self._left -= size
                granted.set_result(None)
                self._waiting.move_to_end(owner)
            queue.popleft()
            if not queue:
                del self._waiting[owner]
