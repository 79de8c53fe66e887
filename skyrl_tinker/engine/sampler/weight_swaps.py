"""Full weights brought to the replicas: to all members at once, or to a newcomer."""

import asyncio
from pathlib import Path

from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.version_files import require_files
from skyrl_tinker.errors import SamplerError, TrainerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.constants import BASE_MODEL, VLLM_START_VERSION
from skyrl_tinker.weight_sync.sync import PARTIAL, sync_weights
from skyrl_tinker.weight_sync.transport import WeightSyncError, WeightTransport


class WeightSwaps:
    """Swaps of the weights that the fleet serves. A version None stands for the base weights."""

    def __init__(self, fleet: Fleet, transport: WeightTransport, facts: BaseModelFacts) -> None:
        self._fleet = fleet
        self._transport = transport
        self._base = Path(facts.directory), BASE_MODEL

    async def swap(self, new: WeightVersion | None) -> None:
        """Bring `new` to all members; those that are left with neither it nor the old weights are replaced.

        StateLostError: its files are gone. SamplerError: no member serves it. TrainerError: because a rank
        died, whose successor can send it.
        """
        if new is not None:
            await asyncio.to_thread(require_files, new)
        async with self._fleet.changing:
            try:
                with self._fleet.long_calls():
                    control = self._fleet.client.control
                    if self._fleet.disaggregated:  # or a prompt of the old weights is continued by the new
                        await control.abort_tagged()
                    synced = await sync_weights(control, self._transport, *self._source(new))
            except WeightSyncError as error:
                for url in error.lost:
                    self._fleet.condemn(url, str(error))
                if isinstance(error.__cause__, TrainerError):
                    raise TrainerError(str(error)) from error
                raise
            for url, cause in synced.lost.items():
                self._fleet.condemn(url, f"it did not take new weights: {cause}")

    async def equip(self, newcomer: RemoteInferenceClient, resident: WeightVersion | None) -> None:
        """Bring the resident weights to a replica that lacks them; called with `changing` held.

        SamplerError for one with part of an update: only a fresh process is rid of it.
        """
        await self._transport.leave()  # it may be at the address of one that had joined
        served = await newcomer.control.weight_version()
        if served == PARTIAL:
            raise SamplerError(f"{newcomer.proxy_url} holds part of an update that failed: start it again")
        if resident is not None or served != VLLM_START_VERSION:  # one that others started may have any
            await sync_weights(newcomer.control, self._transport, *self._source(resident))

    def _source(self, version: WeightVersion | None) -> tuple[Path, str]:
        return (Path(version.directory), version.name) if version else self._base
