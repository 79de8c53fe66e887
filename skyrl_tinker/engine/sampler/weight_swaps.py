"""Full weights brought to the replicas: to all members at once, or to a newcomer."""

from pathlib import Path

from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.constants import BASE_MODEL, VLLM_START_VERSION
from skyrl_tinker.weight_sync.sync import sync_weights
from skyrl_tinker.weight_sync.transport import WeightSyncError, WeightTransport


class WeightSwaps:
    """Swaps of the weights that the fleet serves. A version None stands for the base weights."""

    def __init__(self, fleet: Fleet, transport: WeightTransport, facts: BaseModelFacts) -> None:
        self._fleet = fleet
        self._transport = transport
        self._base = Path(facts.directory), BASE_MODEL
        self._spoiled: set[str] = set()  # replicas that an update left with part of its weights

    async def swap(self, new: WeightVersion | None, old: WeightVersion | None) -> None:
        """Bring in `new`; if that fails go back to `old`, or to the base where its files are gone."""
        async with self._fleet.changing:
            previous = self._source(old if is_there(old) else None)
            try:
                await sync_weights(self._fleet.client.control, self._transport, *self._source(new), previous)
            except WeightSyncError as error:
                self._spoiled.update(error.lost)
                for url in error.lost:
                    self._fleet.condemn(url, str(error))
                raise

    async def served(self) -> str:
        """Return the name of the weights that all members serve. SamplerError when they disagree."""
        async with self._fleet.changing:
            name = await self._fleet.client.control.weight_version()
        return BASE_MODEL if name == VLLM_START_VERSION else name

    async def equip(self, newcomer: RemoteInferenceClient, resident: WeightVersion | None) -> None:
        """Bring the resident weights to a replica that lacks them; called with `changing` held."""
        await self._transport.leave()  # it may be at the address of one that had joined
        # One that we did not start may have any weights, or part of newer ones under an old name.
        fresh = await newcomer.control.weight_version() == VLLM_START_VERSION
        if resident is not None or not fresh or not self._spoiled.isdisjoint(newcomer.server_urls):
            await sync_weights(newcomer.control, self._transport, *self._source(resident), self._base)
        self._spoiled.difference_update(newcomer.server_urls)

    def _source(self, version: WeightVersion | None) -> tuple[Path, str]:
        return (Path(version.directory), version.name) if version else self._base


def is_there(version: WeightVersion | None) -> bool:
    return version is not None and Path(version.directory).is_dir()
