"""Leases of the samplers' weights, one for each request to them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.sampler.adapter_cache import AdapterCache
from skyrl_tinker.engine.sampler.full_weights import FullWeights
from skyrl_tinker.engine.sampler.inflight_targets import SampleSource, newest
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.inference.constants import BASE_MODEL


@dataclass(frozen=True, slots=True)
class Leases:
    placement: Placement
    full_weights: FullWeights
    adapters: AdapterCache
    keeps_cache: bool = False
    """Whether replicas keep their cache when full weights are replaced (setting inflight_cache)."""

    def cache_fields(self) -> Mapping[str, str]:
        """Return fields for a request in a lease, so that it finds nothing cached under other weights.

        Needed for adapters too: a request that outlives its lease may run on under other full parameters.
        """
        return {"cache_salt": self.full_weights.salt} if self.keeps_cache else {}

    @asynccontextmanager
    async def open(self, source: SampleSource) -> AsyncIterator[str]:
        """Yield the model name to request, which has the source's weights until the lease ends.

        A lease holds the samplers' phase on their devices, the resident full weights (for an adapter the
        base's) and the adapter. Each request to the samplers has its own lease: phases and weights can change
        between two requests of a sample.
        """
        async with self.placement.sampling():
            if source is None or newest(source).kind == "full":
                await self.full_weights.acquire(source)
                try:
                    yield BASE_MODEL
                finally:
                    self.full_weights.release()
                return
            self.adapters.require_taken()
            await self.full_weights.acquire(None)
            try:
                version = await self.adapters.acquire(source)
                try:
                    yield version.name
                except NotFoundError:  # a sampler has lost the adapter: the next lease loads it again
                    self.adapters.forget(version)
                    raise
                finally:
                    self.adapters.release(version)
            finally:
                self.full_weights.release()
