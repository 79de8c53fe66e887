"""Waiting requests of each API key, counted together and once a second at most."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.waiting.kept_value import KeptValue
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import OverloadedError
from skyrl_tinker.store.reports import holdings
from skyrl_tinker.store.store import Store

RETRY_S = 2


class KeyBacklogs:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: Counter[OwnerId | None] = Counter()  # at the last count, and accepted here since
        self._held: Counter[OwnerId | None] = Counter()  # requests that the store does not know
        self._counted = KeptValue(self._count)

    async def full(self, caller: Caller) -> OverloadedError | None:
        """Return the refusal of one more request of this key, None while there is room; then count it in."""
        limit = caller.limits.backlog
        if limit is None:
            return None
        await self._counted.get()
        waiting = self._waiting[caller.owner] + self._held[caller.owner]
        if waiting < limit:
            self._waiting[caller.owner] += 1
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
            self._waiting[caller.owner] -= 1  # it is held instead
        self._held[caller.owner] += 1
        try:
            yield
        finally:
            self._held[caller.owner] -= 1
            if not self._held[caller.owner]:
                del self._held[caller.owner]

    async def _count(self) -> None:
        self._waiting = Counter(await self._store.fetch(holdings.pending_requests))
