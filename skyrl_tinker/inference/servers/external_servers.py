"""Samplers that others start and end: servers by URL, with our flags."""

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.client.sampling_port import Dialect, Json
from skyrl_tinker.inference.servers.health_checks import HealthWatch, Loss, Suspicion, health
from skyrl_tinker.system.interfaces import is_here

POLL_S = 1.0
TRY_S = 5.0


@dataclass
class ExternalServers:
    """Counterpart of ServerGroup that waits for dead servers to return. Those on this host see our files.

    `urls`: as http://host:port, given by `setting`. `startup_s`: limit for `ready`, per server.
    """

    urls: tuple[str, ...]
    startup_s: float
    hang_s: float
    max_model_len: int
    sampled_logprobs: Literal["raw", "processed"] = "raw"
    setting: str = "sampler_urls"
    router_replay: bool = False
    dialect: Dialect = field(kw_only=True)
    keeps_cache: bool = field(default=False, kw_only=True)
    suspicion: Suspicion = field(default_factory=Suspicion, init=False)

    def __post_init__(self) -> None:
        self.urls = tuple(url.rstrip("/") for url in self.urls)

    async def ready(self) -> None:
        """Return when all servers answer. Raises SamplerError if one does not, or does not fit."""
        for url in self.urls:
            try:
                await asyncio.wait_for(_healthy(url), self.startup_s)
            except TimeoutError:
                raise SamplerError(
                    f"{url} ({self.setting}) gave no answer in {self.startup_s:.0f} s"
                ) from None
            await self._require_fit(url)

    async def wait_lost(self, index: int) -> Loss:
        """Return once the server is lost: it refuses connections, or gives no answer for `hang_s`."""
        watch = HealthWatch(self.urls[index], self.hang_s, self.suspicion, _running, len(self.urls))
        return await watch.wait_lost(index)

    def suspect(self) -> None:
        """Check all servers now, because a request failed."""
        self.suspicion.ring()

    async def end(self, index: int) -> bool:
        """Return False: the process is not ours to kill."""
        return False

    async def replace(self, index: int) -> str:
        """Return the URL once the server is healthy again; it may hold earlier adapters and weights."""
        await _healthy(self.urls[index])
        await self._require_fit(self.urls[index])
        return self.urls[index]

    async def shutdown(self) -> None:
        """Do nothing: these servers keep running."""

    async def _require_fit(self, url: str) -> None:
        """Raise a SamplerError that names the arguments which the server lacks."""
        advice, probe = self.dialect.advice, self.dialect.pull_probe
        if await _is_elsewhere(url) and not (probe and await _pulls(url + probe)):
            raise SamplerError(
                f"{url} ({self.setting}) is on another host and does not pull weights from this one: start "
                f"it {advice.pull}"
            )
        length, trial = await _prepare(url, self.setting, self.dialect, self.keeps_cache)
        if length < self.max_model_len:
            raise SamplerError(
                f"{url} ({self.setting}) takes {length} tokens, expected {self.max_model_len} "
                f"(context_length + 1): start it with {advice.context.format(self.max_model_len)}"
            )
        mode = self.dialect.logprobs_mode(trial)
        if mode not in (self.sampled_logprobs, None):
            raise SamplerError(
                f"{url} ({self.setting}) answers {mode} logprobs, expected {self.sampled_logprobs} "
                f"(sampled_logprobs): start it with {advice.logprobs.format(self.sampled_logprobs)}"
            )
        if self.router_replay and not self.dialect.lists_experts(trial):
            raise SamplerError(
                f"{url} ({self.setting}) answers no routed experts, expected them (router_replay): "
                f"start it with {advice.experts}"
            )


async def _is_elsewhere(url: str) -> bool:
    try:
        return not await asyncio.to_thread(is_here, url)
    except OSError as error:
        raise SamplerError(f"{url}: {error}") from error


async def _pulls(probe: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(probe) as answer:
            return answer.status == 204
    except aiohttp.ClientError as error:
        raise SamplerError(f"{probe} does not answer: {error}") from error


async def _running() -> str | None:
    return None


async def _healthy(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        while await health(http, url, TRY_S) != 200:  # noqa: ASYNC110 - it is another process that changes
            await asyncio.sleep(POLL_S)


async def _prepare(url: str, setting: str, dialect: Dialect, keeps_cache: bool) -> tuple[int, Json]:
    """Unload old adapters, whose names may recur; return the server's context and its answer to the trial.

    Raises SamplerError if it lacks a route or an adapter function that we need.
    """
    client = RemoteInferenceClient(url, (url,), dialect=dialect)
    control = client.control
    try:
        await control.require_arguments(keeps_cache=keeps_cache)
        await control.weight_version()
        await control.resume()  # a pause that arrived after it hung would hold all requests
        for name in await control.adapters():
            await control.unload_adapter(name)
        await control.reset_prefix_cache()  # it knows adapters by name and path only
        trial = await client.data.generate(dialect.trial)
        return await control.max_model_len(), trial
    except SamplerError as error:
        raise SamplerError(
            f"{url} ({setting}) does not serve what is needed ({error}); "
            "start it as docs/external-samplers.md says, "
            f"above all with {dialect.advice.routes}"
        ) from error
    finally:
        await client.close()
