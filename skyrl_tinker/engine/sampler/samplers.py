"""The sampling servers as the drivers see them: any version, at any time, also across a restart of vLLM."""

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.values import BaseModelFacts, SampleOutput, SampleRequest, WeightVersion
from skyrl_tinker.engine.sampler.adapter_cache import AdapterCache
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.full_weights import FullWeights
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, InflightTargets, Wanted, newest
from skyrl_tinker.errors import NotFoundError, SkyrlTinkerError, UserError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.weight_sync.sync import WeightSyncError, WeightTransport, sync_weights

AFFINITY_TOKENS = 128
UNSYNCED = "default"
"""How vLLM calls the weights that it was started with."""
_log = logging.getLogger(__name__)


class Samplers:
    def __init__(
        self, fleet: Fleet, transport: WeightTransport, facts: BaseModelFacts, adapters: int
    ) -> None:
        """`adapters`: how many are loaded at once."""
        self._fleet = fleet
        self._transport = transport
        self._facts = facts
        self._adapters = AdapterCache(fleet, adapters)
        self._residency = FullWeights(self._swap, self._served)
        self._targets = InflightTargets()
        self._users: Counter[VersionId] = Counter()
        self._spoiled: set[str] = set()  # replicas that an update left with part of its weights
        fleet.equip = self._equip

    async def sample(self, wanted: Wanted, request: SampleRequest) -> SampleOutput:
        """Tried again when vLLM died under it; of an inflight target it goes on with what that becomes."""
        with self._counted(wanted):  # also between the requests that one sample may take
            return await self._fleet.surviving(lambda: self._sample(wanted, request))

    @asynccontextmanager
    async def serving(self, wanted: Wanted) -> AsyncIterator[str]:
        """The model to ask vLLM for, which stands for these weights inside. Many may be inside at once.

        A NotFoundError of vLLM's that passes through has the adapter loaded again for whoever comes next.
        """
        async with self._fleet.placement.sampling(), self._holding(wanted) as name:
            yield name

    @asynccontextmanager
    async def _holding(self, wanted: Wanted) -> AsyncIterator[str]:
        if wanted is not None and newest(wanted).kind == "full":
            async with self._residency.hold(wanted):
                yield BASE_MODEL
        else:
            async with self._residency.hold(None):
                if wanted is None:
                    yield BASE_MODEL
                else:
                    async with self._adapted(wanted) as name:
                        yield name

    @property
    def replicas(self) -> int:
        """How many serve now, at least 1: who asks while all are down waits inside."""
        return max(1, len(self._fleet.client.server_urls))

    @property
    def paused(self) -> str | None:
        """Why no sample gets on just now; None while they do."""
        if not self._fleet.size:
            return "no sampler serves: they are being started again"
        if self._residency.swapping:
            return "samplers are updating weights"
        if self._fleet.placement.asleep:
            return "the trainer has its turn on the devices of the samplers"
        return None

    def in_use(self, version: WeightVersion) -> bool:
        """Whether a sample of it is under way."""
        return version.id in self._users or self._residency.in_use(version)

    def require_served(self, base_model: str) -> None:
        """UserError for a sampling client older than a start of the server with another model."""
        if base_model not in self._facts.names:
            raise UserError(
                f"this sampling client is of base model {base_model!r}, "
                f"expected one that is served: {', '.join(self._facts.names)}"
            )

    def target(self, model: ModelKey, version: WeightVersion) -> InflightTarget:
        """What the inflight sampling clients of this model sample from: `version` or a newer one."""
        return self._targets.at_least(model, version)

    async def load(self, version: WeightVersion) -> None:
        """Before its first sample, so that this one need not wait. Never raises: all comes on demand."""
        if version.kind == "lora":
            with _on_demand(version):
                await self._adapters.load(version)

    async def announce(self, wanted: WeightVersion | InflightTarget) -> None:
        """A version was published. Requests that run on an older one of an inflight target go on with it;
        full parameters come to samplers that have nothing else to do. Never raises: all comes on demand."""
        with _on_demand(newest(wanted)):
            if newest(wanted).kind == "full":
                await self._residency.offer(wanted)
            elif isinstance(wanted, InflightTarget):
                async with self._fleet.placement.awake():
                    await self._fleet.client.abort(wanted.tag)

    async def drop(self, version: WeightVersion) -> None:
        """Nobody will sample it any more."""
        self._targets.drop(version)
        if version.kind == "lora":
            await self._adapters.drop(version)

    @contextmanager
    def _counted(self, wanted: Wanted) -> Iterator[None]:
        users = Counter([wanted.id] if isinstance(wanted, WeightVersion) else [])
        self._users += users
        try:
            yield
        finally:
            self._users -= users  # drops zeros

    async def _sample(self, wanted: Wanted, request: SampleRequest) -> SampleOutput:
        try:
            return await self._ask(wanted, request)
        except NotFoundError as error:  # a sampler had lost the adapter, which is loaded again
            _log.info("tried again: %s", error)
            return await self._ask(wanted, request)

    async def _ask(self, wanted: Wanted, request: SampleRequest) -> SampleOutput:
        return await self._fleet.client.sample(
            lambda: self.serving(wanted),
            request,
            session_key=_session_key(wanted, request),
            eos=self._facts.eos_token_ids,
            context=self._facts.context_length,
            tag=wanted.tag if isinstance(wanted, InflightTarget) else None,
        )

    @asynccontextmanager
    async def _adapted(self, wanted: WeightVersion | InflightTarget) -> AsyncIterator[str]:
        """Of a target the newest at the moment of entering: what runs by then is told by `announce`."""
        while True:
            version = newest(wanted)
            with self._counted(version):
                async with self._adapters.use(version) as name:
                    if version != newest(wanted):
                        continue
                    try:
                        yield name
                    except NotFoundError:
                        self._adapters.forget(version)
                        raise
                    return

    # Full weights

    async def _swap(self, new: WeightVersion | None, old: WeightVersion | None) -> None:
        """If it fails the samplers go back to `old`, or to the base where that is not to be had any more."""
        async with self._fleet.changing:
            previous = self._source(old if _there(old) else None)
            try:
                await sync_weights(self._fleet.client, self._transport, *self._source(new), previous)
            except WeightSyncError as error:
                self._spoiled.update(error.lost)
                for url in error.lost:
                    self._fleet.condemn(url, str(error))
                raise

    async def _served(self) -> str:
        """SamplerError when the replicas disagree."""
        async with self._fleet.changing:
            name = await self._fleet.client.weight_version()
        return BASE_MODEL if name == UNSYNCED else name

    async def _equip(self, newcomer: RemoteInferenceClient) -> None:
        """What a replica that was started anew lacks; called with `changing` held."""
        await self._transport.leave()  # it may be at the address of one that had joined
        await self._adapters.equip(newcomer)
        resident = self._residency.resident
        if resident is not None and not _there(resident):  # nobody samples from it any more
            self._residency.forget()
            resident = None
        # One that we did not start may have any weights, and under an old name parts of newer ones.
        started_anew = await newcomer.weight_version() == UNSYNCED and self._spoiled.isdisjoint(
            newcomer.server_urls
        )
        if resident is not None or not started_anew:
            await sync_weights(newcomer, self._transport, *self._source(resident), self._source(None))
        self._spoiled.difference_update(newcomer.server_urls)

    def _source(self, version: WeightVersion | None) -> tuple[Path, str]:
        if version is None:
            return Path(self._facts.directory), BASE_MODEL
        return Path(version.directory), version.name


@contextmanager
def _on_demand(version: WeightVersion) -> Iterator[None]:
    """What fails here is tried again by the next sample."""
    try:
        yield
    except SkyrlTinkerError as error:
        _log.warning("%s was not brought to the samplers at once: %s", version.name, error)


def _there(version: WeightVersion | None) -> bool:
    return version is not None and Path(version.directory).is_dir()


def _session_key(wanted: Wanted, request: SampleRequest) -> str:
    """Requests that can share cached prefixes go to the same server."""
    digest = hashlib.sha256(_name(wanted).encode())
    digest.update(array("q", request.prompt[:AFFINITY_TOKENS]).tobytes())
    return digest.hexdigest()[:32]


def _name(wanted: Wanted) -> str:
    if isinstance(wanted, InflightTarget):
        return wanted.tag
    return wanted.name if wanted else BASE_MODEL
