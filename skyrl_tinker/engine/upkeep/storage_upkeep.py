"""Upkeep of object storage: its cache on this host, and leftovers of dead hosts in it."""

import math
from collections.abc import Iterator
from functools import partial

from skyrl_tinker.domain.units import GB
from skyrl_tinker.engine.recovery import leftovers
from skyrl_tinker.engine.upkeep.upkeep_step import Step
from skyrl_tinker.storage.checkpoint_storage import InUse, Storage
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import in_transfer_thread

EVICT_S = 300.0
DISCARD_S = 86_400.0
CHECKPOINTS = "[0-9]*/*/*"
"""Pattern of their directories: model, kind, save."""


class StorageUpkeep:
    def __init__(self, store: Store, storage: Storage, cache_gb: float | None, in_use: InUse) -> None:
        """`cache_gb`: limit of the cache; directories `in_use` are not evicted. None: no limit."""
        self._store = store
        self._storage = storage
        self._in_use = in_use
        self._cache_bytes = math.inf if cache_gb is None else cache_gb * GB

    def steps(self) -> Iterator[Step]:
        """Yield the steps, which raise StorageError while the storage is away."""
        if math.isfinite(self._cache_bytes):
            yield Step("the cache of checkpoints", self._evict, EVICT_S)
        yield Step("files of dead hosts", self._discard_left, DISCARD_S)

    async def _evict(self) -> None:
        await in_transfer_thread(self._storage.evict, self._cache_bytes, self._in_use)

    async def _discard_left(self) -> None:
        """Remove directories that dead hosts stored in part, or did not record."""
        saves = leftovers.saves_of(await in_transfer_thread(self._storage.listed, CHECKPOINTS))
        abandoned = await self._store.write(partial(leftovers.list_abandoned, saves=saves)) if saves else ()
        await in_transfer_thread(self._storage.discard_old, CHECKPOINTS, abandoned)
