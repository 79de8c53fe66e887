"""The sampling servers as the drivers use them: any version, at any time, also across their restarts."""

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.samples import SampleOutput, SampleRequest
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.outbox import when_possible
from skyrl_tinker.engine.sampler.adapter_cache import AdapterCache, AdapterLimits
from skyrl_tinker.engine.sampler.affinity import Affinity
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.full_weights import FullWeights
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, InflightTargets, SampleSource, newest
from skyrl_tinker.engine.sampler.lease import Leases
from skyrl_tinker.engine.sampler.sample_call import SampleCall
from skyrl_tinker.engine.sampler.version_files import has_files
from skyrl_tinker.engine.sampler.weight_swaps import WeightSwaps
from skyrl_tinker.engine.scheduling.priorities import Priorities, Share
from skyrl_tinker.engine.scheduling.sample_gate import SampleGate
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import NotFoundError, SkyrlTinkerError, StateLostError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.protocol.queue_views import SamplingView
from skyrl_tinker.protocol.validation.sampling import check_abilities
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.system.off_loop import in_load_thread, in_load_turn
from skyrl_tinker.weight_sync.transport import WeightTransport

_log = logging.getLogger(__name__)


class Samplers:
    def __init__(
        self,
        fleet: Fleet,
        transport: WeightTransport,
        facts: BaseModelFacts,
        adapters: AdapterLimits,
        metrics: Metrics,
        storage: Storage = LOCAL_DISK,
        *,
        keep_cache: bool = False,
    ) -> None:
        """`keep_cache`: when full weights are replaced (setting inflight_cache)."""
        self.storage = storage
        self.takes_adapters = adapters.running > 0
        self.fleet = fleet
        self.facts = facts
        self.gate = SampleGate()
        self.swaps = WeightSwaps(fleet, transport, facts, metrics, keep_cache=keep_cache)
        self._full_weights = FullWeights(self.swaps)
        self._adapters = AdapterCache(fleet, adapters)
        self.affinity = Affinity(lambda: self.replicas)
        self.priorities = Priorities()
        self.leases = Leases(fleet.placement, self._full_weights, self._adapters, keep_cache)
        self._targets = InflightTargets()
        self._users: Counter[VersionId] = Counter()
        self._used_at: dict[VersionId, float] = {}  # monotonic time of the load and of the last sample
        self._began_at = time.monotonic()
        self._restored = asyncio.Event()
        self._restored.set()

    async def sample(self, source: SampleSource, request: SampleRequest, share: Share = None) -> SampleOutput:
        """Sample, and retry if a replica died; an inflight target is followed to its newest version.

        Raises NotSupportedError for a request that a server with another sampling engine accepted.
        """
        check_abilities(request, self.facts.sampler, self.facts.context_length)
        with self._counted(source):  # also between the requests of one sample
            await self.fetch(source, share)
            return await self.fleet.with_retry(lambda: self._sample(source, request, share))

    async def fetch(self, source: SampleSource, share: Share) -> None:
        """Fetch the files from storage, in a turn of the share, or wait for a replay to write them.

        Raises StorageError; StorageAwayError if the storage has not answered for a while.
        """
        if source is None:
            return
        await self.storage.fetch_off_loop(Path(newest(source).directory), share)
        if self._restored.is_set():
            return
        if not await asyncio.to_thread(has_files, newest(source)):
            await self._restored.wait()

    async def await_files(self, source: SampleSource, share: Share) -> None:
        """Wait until the files are here, however long storage is away. Raises StorageError."""
        with self._counted(source):
            await when_possible(self.fetch, source, share)

    @property
    def replicas(self) -> int:
        """Number of members, at least 1: without a member, requests wait in `sample`."""
        return max(1, self.fleet.size)

    def view(self, waiting: SamplingView) -> SamplingView:
        """Add the replicas' state to the view of waiting samples."""
        resident = self._full_weights.resident
        loaded = [*([] if resident is None else [resident]), *self._adapters.loaded()]
        return replace(
            waiting,
            paused=self.paused,
            replicas=self.fleet.view(self.swaps.transport.ways),
            weights=tuple(version.name for version in loaded),
            incidents=tuple(self.fleet.incidents),
        )

    @property
    def cores(self) -> int:
        """Number of engine cores that decode, at least 1."""
        return max(1, self.fleet.cores)

    @property
    def paused(self) -> str | None:
        """Reason why no sample makes progress now; None if they do."""
        if self.gate.reason is not None:
            return self.gate.reason
        if not self.fleet.size:
            return "no sampler is running: they are being restarted"
        if self._full_weights.swapping:
            return "samplers are updating weights"
        if self.fleet.placement.asleep:
            return "the trainer is using the samplers' devices"
        return None

    def await_replay(self) -> None:
        """Make samples of versions without files wait for `replay_ended`: a replay may write the files."""
        self._restored.clear()

    def reset(self) -> None:
        """Assume nothing loaded: the servers have ended, and the next ones have the base weights alone."""
        self._full_weights.reset()
        self._adapters.reset()

    def replay_ended(self) -> None:
        self._restored.set()

    def in_use(self, version: WeightVersion) -> bool:
        """Return whether a sample of it is in progress."""
        return (
            version.id in self._users or self._adapters.in_use(version) or self._full_weights.in_use(version)
        )

    def idle_s(self, version: WeightVersion) -> float:
        """Return the seconds since this engine last published or sampled a version."""
        return time.monotonic() - self._used_at.get(version.id, self._began_at)

    def target(self, model: ModelKey, version: WeightVersion) -> InflightTarget:
        """Return the weights that inflight clients of this model sample: `version` or a newer one."""
        return self._targets.at_least(model, version)

    async def load(self, version: WeightVersion) -> None:
        """Load it before its first sample, which then need not wait. Never raises: samples load on demand."""
        self._used_at[version.id] = time.monotonic()
        if version.kind == "lora":
            with _on_demand(version):
                await self._adapters.load(version)

    async def announce(self, source: WeightVersion | InflightTarget) -> None:
        """Move inflight requests to a published version, and load full parameters on idle samplers.

        Never raises: samples load on demand.
        """
        with _on_demand(newest(source)):
            if newest(source).kind == "full":
                await self._full_weights.offer(source)
            elif isinstance(source, InflightTarget):
                async with self.fleet.placement.awake():
                    await self.fleet.client.control.abort(source.tag)

    def drop_weights(self) -> bool:
        """Let the replicas lose their weights if no request needs them; return whether they may.

        The next request then waits for its weights. Not allowed with adapters: these need the base weights,
        which would be read from files each time.
        """
        return not self.takes_adapters and self._full_weights.drop()

    async def unload(self, version: WeightVersion) -> None:
        """Release a version that no client samples any more."""
        self._targets.forget(version)
        self._used_at.pop(version.id, None)
        if version.kind == "lora":
            await self._adapters.unload(version)

    async def equip(self, newcomer: RemoteInferenceClient) -> None:
        """Load adapters and resident weights on a replica that lacks them; called with `changing` held."""
        await self._adapters.equip(newcomer)
        resident = self._full_weights.resident
        if resident is not None and not self.swaps.has(resident):  # no client samples it any more
            self._full_weights.forget()
            resident = None
        await self.swaps.equip(newcomer, resident)

    @contextmanager
    def _counted(self, source: SampleSource) -> Iterator[None]:
        if not isinstance(source, WeightVersion):
            yield
            return
        self._users[source.id] += 1
        try:
            yield
        finally:
            self._users[source.id] -= 1
            if not self._users[source.id]:
                del self._users[source.id]
            self._used_at[source.id] = time.monotonic()

    async def _sample(self, source: SampleSource, request: SampleRequest, share: Share) -> SampleOutput:
        with self.affinity.key(source, array("q", request.prompt).tobytes(), request.sequences) as key:
            call = SampleCall(
                self.fleet.client.data,
                self.leases,
                source,
                key,
                self.facts.eos_token_ids,
                self.facts.context_length,
                source.tag if isinstance(source, InflightTarget) else None,
                share,
                self.priorities,
            )
            try:
                return await call.execute(request)
            except NotFoundError as error:  # a sampler has lost the adapter: load it again
                _log.info("tried again: %s", error)
                return await call.execute(request)
            except StateLostError:
                if source is None:
                    raise
                # its cached directory was deleted by hand, but counted as here
                fetch = partial(in_load_thread, self.storage.fetch, Path(newest(source).directory))
                await in_load_turn(share, fetch)
                return await call.execute(request)


@contextmanager
def _on_demand(version: WeightVersion) -> Iterator[None]:
    """Log a failure here: the next sample tries again."""
    try:
        yield
    except SkyrlTinkerError as error:
        _log.warning("%s is not loaded by the samplers yet: %s", version.name, error)
