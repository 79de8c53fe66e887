"""Parts that routes use, and FastAPI's dependencies on them and on the owner of a request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from skyrl_tinker.api.api_metrics import ApiMetrics
from skyrl_tinker.api.base_limits import BaseLimits
from skyrl_tinker.api.loop_watch import LoopWatch
from skyrl_tinker.api.middleware.arrivals import Arrivals
from skyrl_tinker.api.middleware.disk_room import DiskRoom
from skyrl_tinker.api.middleware.request_rate import RequestRates
from skyrl_tinker.api.pass_heads import PassHeads
from skyrl_tinker.api.security.keyring import KeyRing
from skyrl_tinker.api.security.signing import Signer
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.waiting.engine_client import EngineClient
from skyrl_tinker.api.waiting.engine_queues import EngineQueues
from skyrl_tinker.api.waiting.heartbeats import Heartbeats
from skyrl_tinker.api.waiting.kept_value import KeptValue
from skyrl_tinker.api.waiting.key_backlogs import KeyBacklogs
from skyrl_tinker.api.waiting.long_poll import FutureWaiter
from skyrl_tinker.api.waiting.server_snapshot import ServerSnapshot
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import OwnerId, Reach
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store


@dataclass(frozen=True, slots=True)
class Services:
    """Parts of one API process, built by `create_app` and passed to every route."""

    settings: Settings
    store: Store
    bases: Bases
    bell: Doorbell
    waiter: FutureWaiter
    limits: BaseLimits
    engine: EngineClient
    metrics: ApiMetrics
    page: KeptValue[bytes]  # of the metrics
    watch: LoopWatch
    gate: asyncio.Semaphore  # for large bodies that are parsed and stored
    keys: KeyRing
    signer: Signer
    queues: EngineQueues
    rates: RequestRates
    backlogs: KeyBacklogs
    arrivals: Arrivals
    heartbeats: Heartbeats
    room: DiskRoom
    snapshot: KeptValue[ServerSnapshot]
    heads: PassHeads
    storage: Storage

    def wake_engine(self) -> None:
        """Ring the engine, after a commit that gives it work."""
        self.bell.ring("engine")


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def owner_of(request: Request) -> OwnerId | None:
    """Return the owner that AuthMiddleware determined; None on a server without keys."""
    owner: OwnerId | None = request.scope.get("owner")
    return owner


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["caller"]
    return caller


def reach_of(request: Request) -> Reach:
    """Return whose work the caller sees: its own, or with an admin key everybody's."""
    return caller_of(request).reach


def _depends(read: Callable[[Request], object]) -> Any:
    """Have FastAPI call it on the loop; it runs dependencies that are not async in a thread."""

    async def dependency(request: Request) -> object:
        return read(request)

    return Depends(dependency)


Deps = Annotated[Services, _depends(_services)]
Owner = Annotated[OwnerId | None, _depends(owner_of)]
CallerDep = Annotated[Caller, _depends(caller_of)]
Reached = Annotated[Reach, _depends(reach_of)]
