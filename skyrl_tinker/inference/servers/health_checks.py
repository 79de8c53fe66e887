"""Health of a server: its answers to checks, and the longest silence that is tolerated."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.http_connection import HttpStatusError, JsonHttp

POLL_S, POLLS_PER_S = 1.0, 16
"""Seconds between a replica's checks, and most checks of all replicas per second: a failed request has all
of them checked immediately."""
CORE_POLL_S = 4.0
"""Less than the 5 s for which servers keep an idle connection: a new one costs more than the check itself."""
SILENT_TRIES = 4
"""Consecutive checks without an answer after which a server counts as hung."""
REFUSED_PAUSE_S = 0.3
ExitReason = Callable[[], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica that no longer serves. `silent`: it may hold requests until it is ended."""

    index: int
    url: str
    reason: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class CoreWatch:
    """Repeated calls through an engine core: GET /health only shows whether its process lives.

    The core answers between two steps: immediately if it is idle, else at the end of its step. It is watched
    for silence of `step_s`, while it is not `excused` by work that takes longer. `route`: answered by the
    core (Dialect.core_path).
    """

    url: str
    route: str
    http: JsonHttp
    step_s: float
    excused: Callable[[], bool]

    async def wait_stuck(self, index: int) -> Loss:
        """Return once the core is stuck. Counts checks, not seconds, as HealthWatch does."""
        silent, try_s = 0, self.step_s / SILENT_TRIES
        while silent < SILENT_TRIES:
            silent = 0 if await self._answers(try_s) or self.excused() else silent + 1
            if not silent:
                await asyncio.sleep(min(CORE_POLL_S, try_s))
        reason = f"its engine core does not answer within {try_s:g} s, {silent} times in a row"
        return Loss(index, self.url, reason, silent=True)

    async def _answers(self, try_s: float) -> bool:
        """Return False only for silence: HealthWatch notices servers that refuse."""
        try:
            async with asyncio.timeout(try_s):
                await self.http.text(self.url + self.route)
        except TimeoutError:
            return False
        except (SamplerError, HttpStatusError):
            return True
        return True


class Suspicion:
    """Signal of a failed request, after which all servers are checked immediately."""

    def __init__(self) -> None:
        self._raised = asyncio.Event()

    def ring(self) -> None:
        self._raised.set()
        self._raised = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a request fails."""
        try:
            await asyncio.wait_for(self._raised.wait(), seconds)
        except TimeoutError:
            return


class HealthWatch:
    """Repeated checks of one server until it is lost."""

    def __init__(
        self, url: str, hang_s: float, suspicion: Suspicion, ended: ExitReason, replicas: int
    ) -> None:
        """`hang_s`: silence that counts as death. `ended`: returns why its process ended, None while it runs.

        `replicas`: number of servers that are watched.
        """
        self._url = url
        self._poll_s = max(POLL_S, replicas / POLLS_PER_S)
        self._try_s = hang_s / SILENT_TRIES
        self._suspicion = suspicion
        self._ended = ended

    async def wait_lost(self, index: int) -> Loss:
        """Return once the server is lost. Counts checks, not seconds: this process itself may be stopped."""
        silent = 0
        async with aiohttp.ClientSession() as http:
            while silent < SILENT_TRIES:
                began = time.monotonic()
                status, reason = await asyncio.gather(health(http, self._url, self._try_s), self._reason())
                if status == 503:
                    reason = reason or "its engine process died"
                if reason is not None:
                    return Loss(index, self._url, reason)
                silent = 0 if status is not None else silent + 1
                await self._pause(silent, time.monotonic() - began)
        return Loss(index, self._url, f"it does not answer, {silent} times in a row", silent=True)

    async def _reason(self) -> str | None:
        try:
            return await asyncio.wait_for(self._ended(), self._try_s)
        except TimeoutError:  # the actor that owns the process hangs: only the server counts
            return None

    async def _pause(self, silent: int, tried_s: float) -> None:
        if not silent:
            await self._suspicion.sleep(self._poll_s)
        elif tried_s < self._try_s / 2:  # refused: no process listens
            await asyncio.sleep(REFUSED_PAUSE_S)


async def health(http: aiohttp.ClientSession, url: str, timeout_s: float) -> int | None:
    """Return the HTTP status of GET /health; None if there was no answer."""
    try:
        async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(timeout_s)) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return None
