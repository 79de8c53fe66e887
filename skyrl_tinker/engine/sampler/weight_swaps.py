"""Full weights for the replicas: loaded on all members together, or on a newcomer.

A version is read from its files; a fresh one from the trainer's ranks, while they lend its captured weights.
"""

import asyncio
import logging
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.version_files import has_files, require_files
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import SamplerError, TrainerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.constants import BASE_MODEL, START_VERSION
from skyrl_tinker.weight_sync.sync import PARTIAL, Synced, sync_weights
from skyrl_tinker.weight_sync.transport import CapturedWeights, WeightSource, WeightSyncError, WeightTransport

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class WeightSwaps:
    """Swaps of the weights that the fleet serves. A version None stands for the base weights.

    `keep_cache`: running requests keep their cache from the old weights.
    """

    _fleet: Fleet
    transport: WeightTransport
    facts: InitVar[BaseModelFacts]
    metrics: InitVar[Metrics]
    keep_cache: bool = False

    def __post_init__(self, facts: BaseModelFacts, metrics: Metrics) -> None:
        self._synced = partial(metrics.synced, facts.name)
        self._base = Path(facts.directory), BASE_MODEL
        self._lent: dict[VersionId, CapturedWeights] = {}
        self._syncing = asyncio.Lock()

    def lend(self, version: WeightVersion, captured: CapturedWeights) -> None:
        """Let syncs of this version take it from the ranks, until `end_loan`."""
        self._lent[version.id] = captured

    async def end_loan(self, version: WeightVersion) -> None:
        """Make later syncs use the files; returns when none reads from the ranks. Harmless without a loan."""
        if self._lent.pop(version.id, None) is not None:
            async with self._syncing:
                pass

    def has(self, version: WeightVersion) -> bool:
        """Return whether there is a source for it: files or a loan."""
        return version.id in self._lent or has_files(version)

    async def swap(self, new: WeightVersion | None) -> None:
        """Load `new` on all members; members left with neither it nor the old weights are replaced.

        Raises StateLostError if its files are gone, SamplerError if no member serves it, TrainerError if a
        rank died: its successor can send it.
        """
        if new is not None and new.id not in self._lent:
            await asyncio.to_thread(require_files, new)
        async with self._fleet.changing.updating() as awake:
            try:
                with self._fleet.long_calls():
                    if self._fleet.disaggregated:  # else new weights would continue a prompt of the old ones
                        await self._fleet.client.control.abort_tagged()
                    synced = await self._sync(self._fleet.client, new, awake=awake)
            except WeightSyncError as error:
                for url in error.lost:
                    self._fleet.condemn(url, str(error))
                if isinstance(error.__cause__, TrainerError):
                    raise TrainerError(str(error)) from error
                raise
            for url, cause in synced.lost.items():
                self._fleet.condemn(url, f"it did not take new weights: {cause}")

    async def equip(self, newcomer: RemoteInferenceClient, resident: WeightVersion | None) -> None:
        """Load the resident weights on a replica that lacks them; called with `changing` held.

        Raises SamplerError for a replica with part of an update: only a fresh process helps.
        """
        await self.transport.leave()  # it may have the address of a former group member
        served = await newcomer.control.weight_version()
        if served == PARTIAL:
            raise SamplerError(f"{newcomer.proxy_url} holds part of an update that failed: start it again")
        if resident is not None or served != START_VERSION:  # an external replica may have any weights
            await self._sync(newcomer, resident)

    async def _sync(
        self, client: RemoteInferenceClient, version: WeightVersion | None, *, awake: bool = True
    ) -> Synced:
        async with self._syncing:
            source, name = self._source(version)
            synced = await sync_weights(
                client.control, self.transport, source, name, awake=awake, keep_cache=self.keep_cache
            )
        self._synced(name, synced.seconds, synced.paused_s)
        origin = "files" if isinstance(source, Path) else "the ranks"
        figures = synced.size / 1e6, synced.seconds, 1000 * synced.paused_s
        _log.info("%s came from %s: %.0f MB in %.2f s, paused for %.0f ms", name, origin, *figures)
        return synced

    def _source(self, version: WeightVersion | None) -> tuple[WeightSource, str]:
        if version is None:
            return self._base
        return self._lent.get(version.id) or Path(version.directory), version.name
