"""The router as a child process: one address for several replicas; a session stays on one replica."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
from aiohttp import web

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.http_connection import bearer
from skyrl_tinker.inference.constants import KEY_CHECK, TOKEN
from skyrl_tinker.inference.servers.health_checks import REFUSED_PAUSE_S, SILENT_TRIES
from skyrl_tinker.inference.servers.ports import LOOPBACK, reserve_port
from skyrl_tinker.system.processes import die_with_parent

POLICY = "consistent_hash"
"""Routing by X-Session-ID. Two policies of 0.1.17 were tried, before plain HTTP workers:

consistent_hash: no state, so a restart loses nothing; 105:95 over 200 sessions, 8:4 over
12; a worker that comes back gets its share immediately. sticky_least_loaded: exactly even, but it counts
sessions indefinitely: a worker that comes back gets every new session until its count equals the others',
while they idle.

Under both, requests for a dead worker fail immediately until the fleet removes it. So the router's own
retries and circuit breaker, which would exclude a healthy replica for the faults of single requests, are
off.
"""
MODULE = "skyrl_tinker.inference.servers.router_process"
NOWHERE = "127.255.255.255"
"""Loopback's broadcast address, to which nobody can connect: for metrics, which require no token."""
START_S = 30.0
POLL_S = 0.05
WATCH_S = 0.25
TRY_S = 2.5
ADD_S = 5  # for a replica to answer the router's first /health, after ours
LONGEST_REQUEST_S = 7 * 86400


@dataclass(frozen=True, slots=True)
class RouterSpec:
    log_dir: str
    token: str = field(repr=False)  # required by it and by the servers behind it
    log_suffix: str = ""  # of the log's name, by which base models differ
    prefill_urls: tuple[str, ...] = ()  # workers that compute prompts for all others, if any


class Router:
    """The router's process. Use it from one event loop on the main thread: the kernel ends both together."""

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self._log = Path(spec.log_dir) / f"router{spec.log_suffix}.log"
        self._guards = (reserve_port(), reserve_port(NOWHERE))  # the second one for metrics
        self._key_check = KeyCheck(spec.token)
        self._workers: dict[str, None] = {}  # in order of arrival
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()

    @property
    def url(self) -> str:
        """The router's address, the same after a restart."""
        return f"http://{LOOPBACK}:{_port(self._guards[0])}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def disaggregates(self) -> bool:
        """True if some workers compute prompts and others their continuations."""
        return bool(self._spec.prefill_urls)

    def enough(self, urls: Sequence[str]) -> bool:
        """Return whether it can route with only these workers: it needs one of each kind."""
        prefill = sum(url in self._spec.prefill_urls for url in urls)
        return not self.disaggregates or 0 < prefill < len(urls)

    async def start(self, urls: Sequence[str] = ()) -> None:
        """Start it, or restart it with the same workers. Raises SamplerError if it does not come up."""
        self._workers.update(dict.fromkeys(urls))
        async with self._starting:
            self._end()
            await self._key_check.start()
            given = tuple(self._workers) if self.disaggregates else ()
            if not self.enough(given):
                raise SamplerError("the router needs a server of prefill_urls and one of decode_urls")
            self._launch(given)
            async with self._session() as http:
                await self._wait_ready(http)
                await self._adjust(http, set(given))

    async def _adjust(self, http: aiohttp.ClientSession, added: set[str]) -> None:
        """Add and remove workers until it has the intended ones, which may change meanwhile."""
        while missing := self._workers.keys() - added:
            await asyncio.gather(*(self._add(http, url) for url in missing))
            added |= missing
        for url in added - self._workers.keys():
            await self._post(http, "/remove_worker", url)

    async def add(self, url: str) -> None:
        """Add a worker. Raises SamplerError if the router does not reach it.

        With disaggregation the router restarts, as 0.1.17 then takes workers only by its arguments.
        """
        self._workers[url] = None
        try:
            if self.disaggregates:
                return await self._start_with_enough()
            async with self._session() as http:
                await self._add(http, url)
        except SamplerError:
            self._workers.pop(url, None)
            raise

    async def remove(self, url: str) -> None:
        """Remove a worker; its requests in progress go on. Harmless if it is unknown."""
        self._workers.pop(url, None)
        with suppress(SamplerError):  # a router that does not answer is restarted, without it
            async with self._session() as http:
                await self._post(http, "/remove_worker", url)

    async def wait_died(self) -> str:
        """Wait until the router has ended or hangs, except during a start; return the reason."""
        silent = 0
        async with self._session() as http:
            while silent < SILENT_TRIES:
                async with self._starting:
                    if not self._running():
                        return "the router ended"
                    silent = silent + 1 if await self._status(http) is None else 0
                await asyncio.sleep(REFUSED_PAUSE_S if silent else WATCH_S)
        return "the router does not answer"

    async def _start_with_enough(self) -> None:
        if self.enough(tuple(self._workers)):
            await self.start()

    async def shutdown(self) -> None:
        self._end()
        await self._key_check.close()
        for guard in self._guards:
            guard.close()

    def _launch(self, workers: Sequence[str]) -> None:
        """Launch the process. `workers`: with disaggregation only."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *self._flags(), *self._kinds(workers)],
                env={
                    **os.environ,
                    "RUST_LOG": "warn",  # else three lines per request
                    TOKEN: self._spec.token,
                    KEY_CHECK: self._key_check.url,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )

    def _flags(self) -> list[str]:
        values = {
            "--host": LOOPBACK,
            "--port": _port(self._guards[0]),
            "--prometheus-host": NOWHERE,
            "--prometheus-port": _port(self._guards[1]),
            "--policy": POLICY,
            "--log-level": "error",
            "--health-check-interval-secs": 1,
            "--health-success-threshold": 1,
            "--worker-startup-check-interval": 1,
            "--worker-startup-timeout-secs": ADD_S,
            "--request-timeout-secs": LONGEST_REQUEST_S,
        }
        pairs = [text for flag, value in values.items() for text in (flag, str(value))]
        return [*pairs, "--disable-retries", "--disable-circuit-breaker"]

    def _kinds(self, workers: Sequence[str]) -> list[str]:
        """Return the flags for the workers of both kinds."""
        kinds = ("--prefill" if url in self._spec.prefill_urls else "--decode" for url in workers)
        return [text for kind, url in zip(kinds, workers, strict=True) for text in (kind, url)]

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=bearer(self._spec.token))

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _wait_ready(self, http: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + START_S
        while await self._status(http) != 200:
            if not self._running() or time.monotonic() > deadline:
                raise SamplerError(f"the router does not start; see {self._log}")
            await asyncio.sleep(POLL_S)

    async def _add(self, http: aiohttp.ClientSession, url: str) -> None:
        status, text = await self._post(http, "/add_worker", url)
        if status != 200 and "already exists" not in text:
            raise SamplerError(f"the router does not take {url}: {text}")

    async def _post(self, http: aiohttp.ClientSession, path: str, url: str) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(2 * ADD_S)
        try:
            async with http.post(self.url + path, params={"url": url}, timeout=timeout) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SamplerError(f"the router failed at {path} of {url}: {error!r}") from error

    async def _status(self, http: aiohttp.ClientSession) -> int | None:
        """Return the HTTP status of /liveness; None if it does not answer."""
        try:
            async with http.get(f"{self.url}/liveness", timeout=aiohttp.ClientTimeout(TRY_S)) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None


def _port(guard: socket.socket) -> int:
    return int(guard.getsockname()[1])


class KeyCheck:
    """Answers GET with 200 or 401. The router caches good tokens, and asks again about others."""

    def __init__(self, token: str) -> None:
        self._expected = bearer(token)["Authorization"].encode()
        app = web.Application()
        app.add_routes([web.get("/", self._check)])
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Listen on a free port of loopback. Idempotent."""
        if self._runner.server is None:
            await self._runner.setup()
            await web.TCPSite(self._runner, LOOPBACK, 0).start()

    @property
    def url(self) -> str:
        host, port = self._runner.addresses[0]
        return f"http://{host}:{port}/"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _check(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode()
        return web.Response(status=200 if secrets.compare_digest(given, self._expected) else 401)
