"""The sampler replicas: starts them, watches them, starts dead ones again."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar, cast

import aiohttp
import ray
from ray.exceptions import RayActorError, RayTaskError

from skyrl_tinker.errors import NotSupportedError, SamplerError, SkyrlTinkerError
from skyrl_tinker.inference.server import ServerStatus, VllmServer
from skyrl_tinker.inference.spec import SamplerSpec

__all__ = ["SamplerSpec", "ServerGroup"]

T = TypeVar("T")
STARTUP_POLL_S = 0.1
WATCH_POLL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 8.0
_log = logging.getLogger(__name__)


class ServerGroup:
    """Use it from one event loop; Ray must be initialised."""

    def __init__(self, spec: SamplerSpec, replicas: list["_Replica"]) -> None:
        self._spec = spec
        self._replicas = replicas

    @classmethod
    def launch(cls, spec: SamplerSpec) -> "ServerGroup":
        """Start the actors and their servers; returns at once, failures show in `ready`."""
        if spec.replicas != 1:
            raise NotSupportedError(f"replicas must be 1 for now, found {spec.replicas}")
        return cls(spec, [_Replica(spec, index) for index in range(spec.replicas)])

    async def ready(self) -> None:
        """Returns when every server answers. SamplerError with the log's tail when one does not come up."""
        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(replica.ready(http) for replica in self._replicas))

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, known once `ready` returned; a restarted server has another one."""
        return tuple(replica.url for replica in self._replicas)

    async def watch(self) -> None:
        """Runs while all servers live; SamplerError within 2 seconds when one died."""
        async with aiohttp.ClientSession() as http:
            while True:
                for replica in self._replicas:
                    await replica.require_alive(http)
                await asyncio.sleep(WATCH_POLL_S)

    async def restart_dead(self) -> None:
        """Replace every dead server and wait until it answers. It has no adapters and the base weights."""
        async with aiohttp.ClientSession() as http:
            for index, replica in enumerate(self._replicas):
                if not await replica.alive(http):
                    await replica.stop()
                    self._replicas[index] = _Replica(self._spec, index)
        await self.ready()

    async def shutdown(self) -> None:
        """Ends every server and its actor, whatever state they are in."""
        await asyncio.gather(*(replica.stop() for replica in self._replicas))

    def pids(self) -> list[int]:
        """Of the vLLM API servers; their engine processes are children of these."""
        return [replica.pid for replica in self._replicas if replica.pid]


class _Replica:
    """One actor with one server."""

    def __init__(self, spec: SamplerSpec, index: int) -> None:
        gpus = 1 if spec.device == "cuda" else 0
        actor_class: Any = ray.remote(VllmServer)
        self._startup_s = spec.startup_s
        self._actor = actor_class.options(num_cpus=0, num_gpus=gpus, max_restarts=0).remote(spec, index)
        self._started = self._actor.start.remote()
        self.url = ""
        self.pid = 0

    async def ready(self, http: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + self._startup_s
        status: ServerStatus = await _answer(self._started)
        self.url, self.pid = status.url, status.pid
        while await _health(http, self.url) != 200:
            if (await self.status()).exit_code is not None:
                raise SamplerError(f"vLLM ended while starting; its log ends with:\n{await self.log_tail()}")
            if time.monotonic() > deadline:
                raise SamplerError(
                    f"vLLM did not start within {self._startup_s:.0f} s (sampler_startup_s); "
                    f"its log ends with:\n{await self.log_tail()}"
                )
            await asyncio.sleep(STARTUP_POLL_S)

    async def status(self) -> ServerStatus:
        return cast(ServerStatus, await _answer(self._actor.status.remote()))

    async def log_tail(self) -> str:
        return cast(str, await _answer(self._actor.log_tail.remote()))

    async def require_alive(self, http: aiohttp.ClientSession) -> None:
        code = (await self.status()).exit_code
        if code is not None:
            raise SamplerError(f"vLLM ended with code {code}; its log ends with:\n{await self.log_tail()}")
        if await _health(http, self.url) == 503:
            raise SamplerError(f"vLLM's engine process died; the log ends with:\n{await self.log_tail()}")

    async def alive(self, http: aiohttp.ClientSession) -> bool:
        try:
            await self.require_alive(http)
        except SamplerError:
            return False
        return True

    async def stop(self) -> None:
        """Killing the actor ends its server too; asking first lets vLLM clean up."""
        with suppress(SkyrlTinkerError, TimeoutError):  # never started, dead or stuck: the kill is enough
            await asyncio.wait_for(_answer(self._actor.stop.remote()), STOP_TIMEOUT_S)
        ray.kill(self._actor)


async def _answer(reference: Awaitable[T]) -> T:
    """SamplerError when the actor is dead; the server's own errors come through as they are."""
    try:
        return await reference
    except RayActorError as error:
        _log.error("the sampler's actor died: %s", error)  # long, with addresses: not for clients
        raise SamplerError("the sampler's actor died") from error
    except RayTaskError as error:
        raise (
            error.cause if isinstance(error.cause, SkyrlTinkerError) else SamplerError(str(error))
        ) from error


async def _health(http: aiohttp.ClientSession, url: str) -> int | None:
    """HTTP status; None when it did not answer, which a busy server may do."""
    try:
        async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(HEALTH_TIMEOUT_S)) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return None
