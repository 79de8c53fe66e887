"""HTTP server on a private socket, for what the API cannot get through the journal: streams and metrics."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from skyrl_tinker.engine.openai.openai_endpoints import OpenAIServer
from skyrl_tinker.engine.telemetry.engine_metrics import CONTENT_TYPE, Metrics
from skyrl_tinker.protocol.queue_views import QueuesView

SHUTDOWN_S = 1.0


class EngineHttpServer:
    """Trusts its clients: only processes of this user may connect, and the API has authorized the request."""

    def __init__(
        self,
        socket: Path,
        openai: OpenAIServer,
        metrics: Metrics,
        replica_metrics: Callable[[], Awaitable[bytes]],
        queues: Callable[[], QueuesView],
        body_bytes: int,
    ) -> None:
        self._socket = socket
        self._metrics = metrics
        self._replica_metrics = replica_metrics
        self._queues = queues
        app = web.Application(client_max_size=body_bytes)
        reports = [
            web.get("/metrics", self._metrics_text),
            web.get("/queues", self._queues_json),
            web.get("/activity", self._activity_json),
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

    async def close(self) -> None:
        await self._runner.cleanup()
        self._socket.unlink(missing_ok=True)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        text = await self._replica_metrics() + self._metrics.text()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _queues_json(self, _: web.Request) -> web.Response:
        return web.Response(body=self._queues().to_bytes(), content_type="application/json")

    async def _activity_json(self, request: web.Request) -> web.Response:
        activity = self._metrics.activity.since(float(request.query["since"]))
        return web.Response(body=await asyncio.to_thread(activity.to_bytes), content_type="application/json")
