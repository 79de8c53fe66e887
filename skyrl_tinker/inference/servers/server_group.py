"""The sampler replicas of this server: started, watched, and replaced when they die."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar, cast

import aiohttp
import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_tinker.errors import SamplerError, SkyrlTinkerError
from skyrl_tinker.inference.servers.health_checks import HealthWatch, Loss, Suspicion, health
from skyrl_tinker.inference.servers.replica_placement import ReplicaPlacement
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.servers.sampler_server import SamplerServer, ServerStatus

T = TypeVar("T")
STARTUP_POLL_S = 0.1
STARTUP_TRY_S = 5.0
STOP_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)


class ServerGroup:
    """All replicas. Use it from one event loop; Ray must be initialised."""

    def __init__(self, spec: SamplerSpec) -> None:
        """Use `launch`."""
        self._spec = spec
        self._placement = ReplicaPlacement(spec)
        self._replicas = [self._start(index) for index in range(spec.replicas)]
        self._suspicion = Suspicion()

    @classmethod
    def launch(cls, spec: SamplerSpec) -> "ServerGroup":
        """Start the actors and their servers without waiting; `ready` raises later failures.

        Raises SamplerError if all replicas are to be on this host and do not fit its memory together.
        """
        if len(_living_nodes()) == 1:
            spec.engine.require_memory(spec, spec.replicas)
        return cls(spec)

    async def ready(self) -> None:
        """Return when every server answers. SamplerError with the log's tail if one does not come up."""
        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(replica.ready(http) for replica in self._replicas))

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, known once `ready` has returned; a replacement has a new one."""
        return tuple(replica.url for replica in self._replicas)

    async def wait_lost(self, index: int) -> Loss:
        """Return once this replica is lost: a process died (noticed in seconds), or it hangs."""
        replica = self._replicas[index]
        ended, count = replica.exit_reason, len(self._replicas)
        watch = HealthWatch(replica.url, self._spec.hang_s, self._suspicion, ended, count)
        return await watch.wait_lost(index)

    def suspect(self) -> None:
        """Check all servers now, because a request failed."""
        self._suspicion.ring()

    async def end(self, index: int) -> bool:
        """Kill a replica's processes, so that no request waits for it any more; return True."""
        await self._replicas[index].kill()
        return True

    async def replace(self, index: int) -> str:
        """Start another server in its place, without adapters and with the base weights; return its URL.

        Raises SamplerError if it does not come up: try again.
        """
        await self._replicas[index].kill()
        self._replicas[index] = replica = self._start(index)
        async with aiohttp.ClientSession() as http:
            await replica.ready(http)
        return replica.url

    async def shutdown(self) -> None:
        """End every server and its actor, in any state."""
        await asyncio.gather(*(replica.stop() for replica in self._replicas))
        self._placement.remove()

    def pids(self) -> list[int]:
        """Return process ids of the API servers; their engine processes are children of these."""
        return [replica.pid for replica in self._replicas if replica.pid]

    def _start(self, index: int) -> "_Replica":
        return _Replica(self._spec, index, self._placement)


class _Replica:
    """One actor with one server."""

    def __init__(self, spec: SamplerSpec, index: int, placement: ReplicaPlacement) -> None:
        actor_class: Any = ray.remote(SamplerServer)
        self._startup_s = spec.startup_s
        self._title = spec.engine.title
        self._placement = placement
        self._actor = actor_class.options(max_restarts=0, **placement.options(index)).remote(spec, index)
        self._started = self._actor.start.remote()
        self._ended = False
        self.url = ""
        self.pid = 0

    async def ready(self, http: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + self._startup_s
        try:
            status: ServerStatus = await asyncio.wait_for(_answer(self._started), self._startup_s)
        except TimeoutError:
            raise SamplerError(
                f"there was no room for a replica within {self._startup_s:.0f} s: "
                + self._placement.describe()
            ) from None
        self.url, self.pid = status.url, status.pid
        while await health(http, self.url, STARTUP_TRY_S) != 200:
            if (await self.status()).exit_code is not None:
                raise SamplerError(
                    f"{self._title} ended while starting; its log ends with:\n{await self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise SamplerError(
                    f"{self._title} did not start within {self._startup_s:.0f} s; "
                    f"its log ends with:\n{await self.log_tail()}"
                )
            await asyncio.sleep(STARTUP_POLL_S)

    async def status(self) -> ServerStatus:
        return cast(ServerStatus, await _answer(self._actor.status.remote()))

    async def log_tail(self) -> str:
        return cast(str, await _answer(self._actor.log_tail.remote()))

    async def exit_reason(self) -> str | None:
        """Return why the server has ended; None while it runs."""
        try:
            code = (await self.status()).exit_code
        except SamplerError as error:
            return str(error)
        return None if code is None else f"{self._title} ended with code {code}"

    async def stop(self) -> None:
        """Stop the server; it gets time to clean up before it is killed with its actor."""
        if not self._ended:
            await self._end(self._actor.stop.remote(), STOP_TIMEOUT_S)

    async def kill(self) -> None:
        """Kill the server immediately, even if it hangs; harmless if it has ended."""
        if not self._ended:
            await self._end(self._actor.kill.remote(), KILL_TIMEOUT_S)

    async def _end(self, stopping: Awaitable[None], timeout_s: float) -> None:
        self._ended = True
        with suppress(SkyrlTinkerError, TimeoutError):  # never started, dead or stuck: the kill is enough
            await asyncio.wait_for(_answer(stopping), timeout_s)
        ray.kill(self._actor)


def _living_nodes() -> list[Any]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


async def _answer(reference: Awaitable[T]) -> T:
    """Await the actor's answer. SamplerError if it is dead or never ran; its own errors pass unchanged."""
    try:
        return await reference
    except RayTaskError as error:
        raise (
            error.cause if isinstance(error.cause, SkyrlTinkerError) else SamplerError(str(error))
        ) from error
    except RayError as error:
        _log.error("the sampler's actor died: %s", error)  # long, with addresses: not for clients
        raise SamplerError(f"the sampler's actor died ({type(error).__name__})") from error
