"""HTTP server that checks a request for our token; the router asks it about its clients."""

import secrets

from aiohttp import web

from skyrl_tinker.inference.client.http_connection import bearer
from skyrl_tinker.inference.servers.ports import LOOPBACK


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
