"""Which LoRA adapters the samplers have: loaded on demand, evicted oldest first, loaded again on demand."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from skyrl_tinker.errors import StateLostError
from skyrl_tinker.inference.client import RemoteInferenceClient
from skyrl_tinker.wire.ids import VersionId
from skyrl_tinker.wire.values import WeightVersion


class Adapters:
    def __init__(self, client: RemoteInferenceClient, capacity: int) -> None:
        """`capacity`: how many stay loaded when nobody uses them."""
        self._client = client
        self._capacity = capacity
        self._loaded: OrderedDict[VersionId, str] = OrderedDict()  # names, least recently used first
        self._users: Counter[VersionId] = Counter()
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def use(self, version: WeightVersion) -> AsyncIterator[str]:
        """The adapter's name; it stays loaded inside. StateLostError, SamplerError if it cannot be loaded."""
        self._users[version.id] += 1
        try:
            await self.load(version)
            yield version.name
        finally:
            self._users[version.id] -= 1
            self._users += Counter()  # drops zeros

    async def load(self, version: WeightVersion) -> None:
        if version.id not in self._loaded:
            async with self._changing:
                if version.id not in self._loaded:
                    await self._load(version)
                    await self._evict()
        if version.id in self._loaded:
            self._loaded.move_to_end(version.id)

    async def drop(self, version: WeightVersion) -> None:
        """Nobody will sample it any more."""
        async with self._changing:
            await self._unload(version.id)

    def forget(self, version: VersionId) -> None:
        """The samplers have lost it."""
        self._loaded.pop(version, None)

    def forget_all(self) -> None:
        self._loaded.clear()

    async def _load(self, version: WeightVersion) -> None:
        if not await asyncio.to_thread(Path(version.directory).is_dir):
            raise StateLostError(
                f"the weights of this sampling client are gone from {version.directory}: save them again"
            )
        await self._client.load_adapter(version.name, version.directory)
        self._loaded[version.id] = version.name

    async def _evict(self) -> None:
        idle = [version for version in self._loaded if not self._users[version]]
        for version in idle[: max(0, len(self._loaded) - self._capacity)]:
            await self._unload(version)

    async def _unload(self, version: VersionId) -> None:
        name = self._loaded.pop(version, None)
        if name is not None:
            await self._client.unload_adapter(name)
