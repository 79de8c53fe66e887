"""LoRA adapters on the samplers: loaded on demand, the least recently used evicted, loaded again."""

import asyncio
from collections import Counter, OrderedDict
from contextlib import suppress
from itertools import islice

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, newest
from skyrl_tinker.engine.sampler.version_files import require_files
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient


class AdapterCache:
    """Cache of at most `capacity` adapters, as many as each vLLM keeps in memory: it never evicts one in use.

    When all are in use, versions wait in turn. For each that waits, one of those that are loaded, the least
    recently used, takes no more requests until it is idle and can go, so that none starves.
    """

    def __init__(self, fleet: Fleet, capacity: int) -> None:
        self._fleet = fleet
        self._capacity = capacity
        self._loaded: OrderedDict[VersionId, WeightVersion] = OrderedDict()  # least recently used first
        self._users: Counter[VersionId] = Counter()
        self._waiting: OrderedDict[VersionId, int] = OrderedDict()  # how many requests wait for each
        self._changed = asyncio.Event()

    async def acquire(self, source: WeightVersion | InflightTarget) -> WeightVersion:
        """Return the version whose adapter is loaded, and stays so until `release`.

        Of a target it is the newest when this returns; `Samplers.announce` interrupts what runs from then on.
        StateLostError, SamplerError if it cannot be loaded.
        """
        while True:
            version = newest(source)
            if not self._is_open(version):
                await self._wait_for(version)
            self._users[version.id] += 1
            self._loaded.move_to_end(version.id)
            if version == newest(source):
                return version
            self.release(version)

    def release(self, version: WeightVersion) -> None:
        self._users[version.id] -= 1
        if not self._users[version.id]:
            del self._users[version.id]
            self._wake()

    def in_use(self, version: WeightVersion) -> bool:
        """Return whether requests hold it or wait for it."""
        return version.id in self._users or version.id in self._waiting

    def loaded(self) -> list[WeightVersion]:
        """Return the versions that every member has, least recently used first."""
        return list(self._loaded.values())

    async def load(self, version: WeightVersion) -> None:
        """Load it, unless all that are loaded are in use or a change is under way, which may take minutes.

        Then it comes with its first request.
        """
        if self._fleet.changing.held:
            return
        async with self._fleet.changing:
            if version.id not in self._loaded and not self._waiting and self._has_place():
                await self._load(version)

    async def unload(self, version: WeightVersion) -> None:
        """Unload a version that no client samples any more. One that a request began with meanwhile stays."""
        async with self._fleet.changing:
            if version.id not in self._users:
                await self._evict(version.id)
                self._wake()

    def forget(self, version: WeightVersion) -> None:
        """Mark it as not loaded, because a sampler lost it; loading it again does no harm to the others."""
        self._loaded.pop(version.id, None)
        self._wake()

    async def equip(self, newcomer: RemoteInferenceClient) -> None:
        """Load what the other replicas have; called with `changing` held.

        An adapter that is gone or refused is forgotten: it must not keep the newcomer away.
        """
        for version in list(self._loaded.values()):
            try:
                await newcomer.control.load_adapter(version.name, version.directory)
            except SamplerError:
                await newcomer.control.health()  # SamplerError: it is the newcomer that is broken
                self.forget(version)

    async def _wait_for(self, version: WeightVersion) -> None:
        self._waiting[version.id] = self._waiting.get(version.id, 0) + 1
        try:
            while not await self._load_in_turn(version):
                await self._changed.wait()
        finally:
            self._waiting[version.id] -= 1
            if not self._waiting[version.id]:
                del self._waiting[version.id]
                self._wake()

    async def _load_in_turn(self, version: WeightVersion) -> bool:
        """Load it if it is its turn and a place is free; return whether it takes requests."""
        if self._may_load(version):
            async with self._fleet.changing:
                if self._may_load(version):
                    await self._load(version)
        return self._is_open(version)

    def _is_open(self, version: WeightVersion) -> bool:
        if version.id not in self._loaded:
            return False
        missing = self._missing()
        return not missing or self._has_place() or version.id not in islice(self._loaded, len(missing))

    def _may_load(self, version: WeightVersion) -> bool:
        return self._missing()[:1] == [version.id] and self._has_place()

    def _missing(self) -> list[VersionId]:
        """List the versions that requests wait for, in turn."""
        return [version for version in self._waiting if version not in self._loaded]

    def _has_place(self) -> bool:
        return len(self._loaded) < self._capacity or self._idle() is not None

    def _idle(self) -> VersionId | None:
        return next((version for version in self._loaded if version not in self._users), None)

    async def _load(self, version: WeightVersion) -> None:
        await asyncio.to_thread(require_files, version)
        while len(self._loaded) >= self._capacity and (idle := self._idle()) is not None:
            await self._evict(idle)
        await self._fleet.client.control.load_adapter(version.name, version.directory)
        self._loaded[version.id] = version
        self._wake()

    async def _evict(self, version: VersionId) -> None:
        """Unload it; best effort, as a name that stays behind on a sampler is never used again."""
        loaded = self._loaded.pop(version, None)
        if loaded is not None:
            with suppress(SamplerError):
                await self._fleet.client.control.unload_adapter(loaded.name)

    def _wake(self) -> None:
        self._changed.set()  # all that wait now, and none later
        self._changed.clear()
