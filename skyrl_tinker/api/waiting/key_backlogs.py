"""Waiting requests of each API key that has a limit of them, counted once a second at most."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import OverloadedError
from skyrl_tinker.store.reports import holdings
from skyrl_tinker.store.store import Store

COUNT_EVERY_S = 1.0
RETRY_S = 2


@dataclass(slots=True)
class _Count:
    """`waiting`: at the last count, and accepted here since."""

    waiting: int
    counted_at: float


class KeyBacklogs:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: dict[OwnerId | None, _Count] = {}
        self._held: Counter[OwnerId | None] = Counter()  # requests that the store does not know
        self._counting = asyncio.Lock()

    async def full(self, caller: Caller) -> OverloadedError | None:
        """Return the refusal of one more request of this key, None while there is room; then count it in."""
        limit = caller.limits.backlog
        if limit is None:
            return None
        count = await self._count(caller.owner)
        waiting = count.waiting + self._held[caller.owner]
        if waiting < limit:
            count.waiting += 1
            return None
        return OverloadedError(
            f"keys.backlog: found {waiting} waiting requests, expected at most {limit} of one API key: "
            "send this request again later",
            RETRY_S,
        )

    @asynccontextmanager
    async def held(self, caller: Caller) -> AsyncIterator[None]:
        """Count one more request, which the store does not know, meanwhile. Raises OverloadedError."""
        if refusal := await self.full(caller):
            raise refusal
        if caller.limits.backlog is not None:
            self._counts[caller.owner].waiting -= 1  # it is held instead
        self._held[caller.owner] += 1
        try:
            yield
        finally:
            self._held -= Counter([caller.owner])  # drops zeros

    async def _count(self, owner: OwnerId | None) -> _Count:
        async with self._counting:  # those that come meanwhile use the same count
            count = self._counts.get(owner)
            if count is None or time.monotonic() - count.counted_at > COUNT_EVERY_S:
                waiting = await self._store.fetch(lambda conn: holdings.pending_requests(conn, owner))
                count = self._counts[owner] = _Count(waiting, time.monotonic())
            return count
