"""Leases of the samplers' weights, one for each request to vLLM."""

import sys
from types import TracebackType

from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.sampler.adapter_cache import AdapterCache
from skyrl_tinker.engine.sampler.full_weights import FullWeights
from skyrl_tinker.engine.sampler.inflight_targets import SampleSource, newest
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.inference.constants import BASE_MODEL


class Leases:
    def __init__(self, placement: Placement, full_weights: FullWeights, adapters: AdapterCache) -> None:
        self.placement = placement
        self.full_weights = full_weights
        self.adapters = adapters

    def open(self, source: SampleSource) -> "Lease":
        return Lease(self, source)


class Lease:
    """Entered, it yields the model to request, which stands for the source's weights until it is left.

    It holds the samplers' turn on their devices, the resident full weights (under an adapter those of the
    base), and the adapter. A sample takes one for each request to vLLM, so that turns and weights can change
    between two of them. Many may be held at once.
    """

    def __init__(self, leases: Leases, source: SampleSource) -> None:
        self._full_weights = leases.full_weights
        self._adapters = leases.adapters
        self._turn = leases.placement.sampling()
        self._source = source
        self._adapter: WeightVersion | None = None

    async def __aenter__(self) -> str:
        await self._turn.__aenter__()
        try:
            return await self._acquire_weights()
        except BaseException:
            await self._turn.__aexit__(*sys.exc_info())
            raise

    async def _acquire_weights(self) -> str:
        source = self._source
        if source is None or newest(source).kind == "full":
            await self._full_weights.acquire(source)
            return BASE_MODEL
        await self._full_weights.acquire(None)
        try:
            self._adapter = await self._adapters.acquire(source)
        except BaseException:
            self._full_weights.release()
            raise
        return self._adapter.name

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._adapter is not None:
            if isinstance(error, NotFoundError):  # a sampler has lost the adapter: the next lease loads it
                self._adapters.forget(self._adapter)
            self._adapters.release(self._adapter)
        self._full_weights.release()
        await self._turn.__aexit__(kind, error, trace)
