"""Request rates of API keys, each a token bucket in the database that all API processes share.

A process takes a second's tokens at a time, so that few requests wait for the database.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy.exc import OperationalError

from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import OverloadedError
from skyrl_tinker.store.cluster import token_buckets
from skyrl_tinker.store.store import Store

BURST_S = 10.0
"""A bucket holds the tokens of so many seconds: clients send in bursts."""
SHARE_S = 1.0
"""A process takes the tokens of so many seconds at once, at least one, and keeps them for BURST_S at most."""
LOOK_S = 1.0
"""Least time until an empty bucket is asked again: no client is told to come back sooner."""
AWAY_S = 5.0
"""Time until a database is asked again that did not answer."""


@dataclass(slots=True)
class _Share:
    """Tokens of one key, kept until `ends`.

    Before `empty_until` the bucket is not asked, before `away_until` the database is not, and nobody refused.
    """

    tokens: int = 0
    ends: float = 0.0
    empty_until: float = 0.0
    away_until: float = 0.0
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)


class RequestRates:
    """Shares of one process of the buckets of the keys that have a rate."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._shares: dict[tuple[OwnerId | None, float], _Share] = {}  # a new rate counts at once

    async def admit(self, caller: Caller) -> None:
        """Take a token. Raises OverloadedError, with the time until there is one.

        While the database is away, or its disk full, requests are not counted.
        """
        rate = caller.limits.requests_per_s
        if rate is None:
            return
        share = self._shares.setdefault((caller.owner, rate), _Share())
        async with share.taking:
            now = self._clock()
            if (share.tokens < 1 or now > share.ends) and now >= share.empty_until:
                if now < share.away_until:
                    return
                try:
                    await self._take(share, caller.owner, rate)
                except OperationalError:  # whatever needs the database says so itself
                    share.away_until = self._clock() + AWAY_S
                    return
            if share.tokens < 1:
                raise OverloadedError(
                    f"keys.requests_per_s: found more than {_most(rate):.6g} requests in {BURST_S:g} s, "
                    f"expected at most {rate:.6g} a second from one API key: send this request again later",
                    max(1, math.ceil(share.empty_until - self._clock())),
                )
            share.tokens -= 1

    async def _take(self, share: _Share, owner: OwnerId | None, rate: float) -> None:
        share.tokens, left = await self._store.write(
            lambda conn: token_buckets.take(
                conn,
                f"requests_per_s of {owner}",
                rate=rate,
                most=_most(rate),
                wanted=max(1.0, rate * SHARE_S),
            )
        )
        now = self._clock()
        share.ends = now + BURST_S
        if share.tokens < 1:
            share.empty_until = now + max((1 - left) / rate, LOOK_S)


def _most(rate: float) -> float:
    return max(1.0, rate * BURST_S)
