"""Memory budget in bytes, shared by the requests of all owners."""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_tinker.domain.ids import OwnerId


@dataclass(slots=True)
class Share:
    """Bytes of the budget that one request holds."""

    size: int
    owner: OwnerId | None


class ByteBudget:
    """Budget of `total` bytes, granted to the owners in turn, and within each first come, first served.

    A request for more than is left waits, unless its owner holds nothing: however long others hold bytes,
    each can have one at a time. One for more than `total` counts as so much.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._left = total  # below 0 where owners have one each
        self._held: Counter[OwnerId | None] = Counter()
        self._waiting: OrderedDict[OwnerId | None, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def holding(self, size: int, owner: OwnerId | None) -> AsyncIterator[Share]:
        """Hold `size` bytes inside the context; `shrink` gives a part back earlier."""
        share = Share(min(size, self._total), owner)
        await self._acquire(share.size, owner)
        try:
            yield share
        finally:
            self.shrink(share, 0)

    def shrink(self, share: Share, size: int) -> None:
        """Reduce the share to `size` bytes; it never grows."""
        size = min(size, share.size)
        self._return(share.size - size, share.owner)
        share.size = size

    async def _acquire(self, size: int, owner: OwnerId | None) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size, granted))
        self._grant(owner)
        try:
            await granted
        except asyncio.CancelledError:
            self._return(0 if granted.cancelled() else size, owner)
            raise

    def _return(self, size: int, owner: OwnerId | None) -> None:
        self._left += size
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]
        self._grant(owner)

    def _grant(self, owner: OwnerId | None) -> None:
        """Grant what has become possible, as this owner asked for bytes or returned some."""
        if owner in self._waiting and owner not in self._held:  # all others that wait hold some
            self._grant_next(owner, math.inf)
        while self._waiting and self._grant_next(next(iter(self._waiting)), self._left):
            pass

    def _grant_next(self, owner: OwnerId | None, most: float) -> bool:
        """Grant an owner's next request of at most so many bytes; False if it is larger."""
        queue = self._waiting[owner]
        while queue and queue[0][1].cancelled():
            queue.popleft()
        if queue:
            size, granted = queue[0]
            if size > most:
                return False
            queue.popleft()
            self._left -= size
            self._held[owner] += size
            granted.set_result(None)
            self._waiting.move_to_end(owner)
        if not queue:
            del self._waiting[owner]
        return True
