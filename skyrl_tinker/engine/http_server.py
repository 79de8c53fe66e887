"""HTTP server on a private socket, for data that the API cannot get through the journal: streams and metrics.

With the setting engine_listen it also listens on an address, for API processes on other hosts.
"""

import asyncio
import hmac
import socket as sockets
from collections.abc import Awaitable, Callable
from dataclasses import InitVar, dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from skyrl_tinker.engine.openai.openai_routes import OpenAIRoutes
from skyrl_tinker.engine.scheduling.throughput import SLOT_S
from skyrl_tinker.engine.telemetry.engine_metrics import CONTENT_TYPE, Metrics
from skyrl_tinker.errors import StartupError
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.protocol.schemas.administration import ChangeBaseRequest
from skyrl_tinker.protocol.schemas.now import RecentRates
from skyrl_tinker.store.cluster.signing_secrets import ENGINE_HEADER

SHUTDOWN_S = 1.0
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class OpenAddress:
    """Address to listen on (port 0: any), and the token that clients there must send, which may change."""

    host: str
    port: int
    token: Callable[[], str]


@dataclass(eq=False)
class EngineHttpServer:
    """Trusts its clients: they run as this user or know the token, and the API has authorized the request."""

    _socket: Path
    openai: InitVar[OpenAIRoutes]
    _metrics: Metrics
    _replica_metrics: Callable[[], Awaitable[bytes]]
    _queues: Callable[[], QueuesView]
    _change_base: Callable[[ChangeBaseRequest], str]
    body_bytes: InitVar[int]
    _network: OpenAddress | None = None

    def __post_init__(self, openai: OpenAIRoutes, body_bytes: int) -> None:
        self.address: str | None = None
        """HOST:PORT by which other hosts reach it, once it is started; None: not reachable."""
        app = web.Application(client_max_size=body_bytes, middlewares=[self._authorized])
        reports = [
            web.get("/metrics", self._metrics_text),
            web.get("/queues", self._queues_json),
            web.get("/activity", self._activity_json),
            web.get("/rates", self._rates_json),
            web.post("/bases", self._base_changed),
        ]
        app.add_routes([*openai.routes(), *reports])
        # A client that goes away cancels its handler.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )

    async def start(self) -> None:
        await self._runner.setup()
        self._socket.unlink(missing_ok=True)  # left by an engine that was killed
        await web.UnixSite(self._runner, str(self._socket)).start()
        self._socket.chmod(0o600)
        if self._network is not None:
            self.address = await self._listen(self._network)

    async def _listen(self, network: OpenAddress) -> str:
        try:
            await (site := web.TCPSite(self._runner, network.host, network.port)).start()
        except OSError as error:
            raise StartupError(
                f"engine_listen: cannot listen on {network.host}:{network.port} ({error})"
            ) from error
        port = site.port
        host = sockets.gethostname() if network.host in _ANY else network.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()
        self._socket.unlink(missing_ok=True)

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the token of clients that connect over the network."""
        if isinstance(request.get_extra_info("sockname"), tuple):  # of a Unix socket it is a path
            shown = request.headers.get(ENGINE_HEADER, "")
            if self._network is None or not hmac.compare_digest(
                shown.encode(), self._network.token().encode()
            ):
                raise web.HTTPUnauthorized
        return await handler(request)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        text = await self._replica_metrics() + self._metrics.text()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _queues_json(self, _: web.Request) -> web.Response:
        return web.Response(body=self._queues().to_bytes(), content_type="application/json")

    async def _base_changed(self, request: web.Request) -> web.Response:
        asked = ChangeBaseRequest.model_validate_json(await request.read())
        return web.Response(text=self._change_base(asked))

    async def _activity_json(self, request: web.Request) -> web.Response:
        activity = self._metrics.activity.since(float(request.query["since"]))
        return web.Response(body=await asyncio.to_thread(activity.to_bytes), content_type="application/json")

    async def _rates_json(self, _: web.Request) -> web.Response:
        trained, sampled = self._metrics.trained_meter.hour(), self._metrics.sampled_meter.hour()
        rates = RecentRates(every_s=SLOT_S, trained=trained, sampled=sampled)
        return web.Response(text=rates.model_dump_json(), content_type="application/json")
