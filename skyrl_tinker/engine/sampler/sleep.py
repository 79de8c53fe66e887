"""Sleep and wake-up of all sampler replicas: those that fail are replaced."""

import asyncio
from collections.abc import Awaitable, Callable

from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.sampling_port import SamplerControl

TIMEOUT_S = 120.0
"""Long, because the first sleep pins as much host memory as the weights take."""


class SleepControl:
    """Running requests pause while their replica sleeps, and continue from the same token afterwards."""

    def __init__(self, fleet: Fleet, drop_weights: Callable[[], bool]) -> None:
        """`drop_weights`: returns True if weights may be lost, as the next request loads others."""
        self._fleet = fleet
        self._drop_weights = drop_weights

    async def sleep(self) -> None:
        """Return when all GPU memory is free, also that of replicas that had to be ended.

        Weights that may be lost take no host memory meanwhile.
        """
        level = 2 if self._drop_weights() else 1
        await self._call_all("go to sleep", lambda replica: replica.sleep(level, "keep"))

    async def wake_weights(self) -> None:
        """Return when the weights of all members can be replaced; they serve after `wake_caches`."""
        await self._call_all("wake up", lambda replica: replica.wake_up(["weights"]))

    async def wake_caches(self) -> None:
        """Return when all members serve; there may be none left, with replacements starting."""
        await self._call_all("wake up", lambda replica: replica.wake_up(["kv_cache"]))

    async def _call_all(self, what: str, call: Callable[[SamplerControl], Awaitable[None]]) -> None:
        await asyncio.gather(*(self._call(url, what, call) for url in self._fleet.client.server_urls))

    async def _call(self, url: str, what: str, call: Callable[[SamplerControl], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await call(self._fleet.client.control.replica(url))
        except (SamplerError, TimeoutError) as error:
            self._fleet.condemn(url, f"it did not {what}: {error!r}")
            await self._fleet.wait_ended(url)
