"""The sampling servers as the drivers see them: any version, at any time, also across a restart of vLLM."""

import asyncio
import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from skyrl_tinker.engine.adapters import Adapters
from skyrl_tinker.engine.residency import Residency
from skyrl_tinker.engine.status import Status
from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference.client import RemoteInferenceClient
from skyrl_tinker.inference.group import ServerGroup
from skyrl_tinker.inference.spec import BASE_MODEL
from skyrl_tinker.weight_sync.base import WeightTransport, sync_weights
from skyrl_tinker.wire.ids import VersionId
from skyrl_tinker.wire.values import BaseModelFacts, SampleOutput, SampleRequest, WeightVersion

ATTEMPTS = 3
NOTICED_WITHIN_S = 4.0  # a dead server is noticed after 2 s
RETRY_S = 5.0
AFFINITY_TOKENS = 128
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Samplers:
    def __init__(
        self,
        servers: ServerGroup,
        client: RemoteInferenceClient,
        transport: WeightTransport,
        facts: BaseModelFacts,
        adapters: int,
    ) -> None:
        """`servers` are ready; `adapters`: how many stay loaded unused."""
        self._servers = servers
        self._client = client
        self._transport = transport
        self._facts = facts
        self._adapters = Adapters(client, adapters)
        self._residency = Residency(self._bring)
        self._users: Counter[VersionId] = Counter()
        self._restarts = 0
        self._up = asyncio.Event()
        self._up.set()

    async def supervise(self, status: Status) -> None:
        """Starts dead servers again, for ever: training goes on meanwhile, and samples wait."""
        while True:
            try:
                await self._servers.watch()
            except SamplerError as error:
                _log.error("the sampler died and is started again: %s", error)
                self._up.clear()
                await status.say("restarting", "the sampler died and is started again; models are unharmed")
                await self._restart()
                await status.say("ready", "")

    async def sample(self, version: WeightVersion | None, request: SampleRequest) -> SampleOutput:
        """From an adapter, full parameters or (None) the base model; tried again when vLLM died under it."""
        with self._counted(version):
            return await self._surviving(lambda: self._sample(version, request))

    def in_use(self, version: WeightVersion) -> bool:
        """Whether a sample of it is under way."""
        return version.id in self._users

    def require_served(self, base_model: str) -> None:
        """UserError for a sampling client older than a start of the server with another model."""
        if base_model not in self._facts.names:
            raise UserError(
                f"this sampling client is of base model {base_model!r}, "
                f"expected one that is served: {', '.join(self._facts.names)}"
            )

    async def load(self, version: WeightVersion) -> None:
        """Before its first sample, so that this one need not wait. Full parameters come on demand."""
        if version.kind == "lora":
            await self._surviving(lambda: self._adapters.load(version))

    async def drop(self, version: WeightVersion) -> None:
        if version.kind == "lora":
            await self._adapters.drop(version)

    @contextmanager
    def _counted(self, version: WeightVersion | None) -> Iterator[None]:
        users = Counter([version.id] if version else [])
        self._users += users
        try:
            yield
        finally:
            self._users -= users  # drops zeros

    async def _sample(self, version: WeightVersion | None, request: SampleRequest) -> SampleOutput:
        key = _session_key(version, request)
        if version is not None and version.kind == "full":
            async with self._residency.hold(version):
                return await self._ask(BASE_MODEL, request, key)
        async with self._residency.hold(None):
            if version is None:
                return await self._ask(BASE_MODEL, request, key)
            return await self._sample_adapter(version, request, key)

    async def _sample_adapter(self, version: WeightVersion, request: SampleRequest, key: str) -> SampleOutput:
        try:
            async with self._adapters.use(version) as name:
                return await self._ask(name, request, key)
        except NotFoundError:  # vLLM does not know the name: it was started anew
            self._adapters.forget(version.id)
        async with self._adapters.use(version) as name:
            return await self._ask(name, request, key)

    async def _ask(self, model: str, request: SampleRequest, key: str) -> SampleOutput:
        facts = self._facts
        return await self._client.sample(
            model, request, session_key=key, eos=facts.eos_token_ids, context=facts.context_length
        )

    async def _bring(self, version: WeightVersion | None) -> None:
        directory, name = (
            (version.directory, version.name) if version else (self._facts.directory, BASE_MODEL)
        )
        await sync_weights(self._client, self._transport, Path(directory), name)

    async def _surviving(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(ATTEMPTS - 1):
            restarts = self._restarts
            try:
                return await attempt()
            except SamplerError as error:
                if not await self._came_back(restarts):
                    raise
                _log.info("tried again after a restart of the sampler: %s", error)
        return await attempt()

    async def _came_back(self, restarts: int) -> bool:
        """Whether servers died since `restarts` was read and serve again; False: the fault lies elsewhere."""
        for _ in range(int(NOTICED_WITHIN_S * 10)):
            if not self._up.is_set() or self._restarts > restarts:
                break
            await asyncio.sleep(0.1)
        else:
            return False
        await self._up.wait()
        return True

    async def _restart(self) -> None:
        while True:
            try:
                await self._servers.restart_dead()
                break
            except SamplerError as error:
                _log.error("the sampler did not start, trying again in %.0f s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)
        self._client.retarget(self._servers.urls[0], self._servers.urls)
        self._adapters.forget_all()
        self._residency.forget()
        self._restarts += 1
        self._up.set()


def _session_key(version: WeightVersion | None, request: SampleRequest) -> str:
    """Requests that can share cached prefixes go to the same server."""
    digest = hashlib.sha256((version.name if version else BASE_MODEL).encode())
    digest.update(array("q", request.prompt[:AFFINITY_TOKENS]).tobytes())
    return digest.hexdigest()[:32]
