"""A server on the engine's private socket, with the routes of a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from skyrl_tinker.directories import Directories
from tests.api.support.world import World


@asynccontextmanager
async def engine(world: World, *routes: web.RouteDef) -> AsyncIterator[None]:
    socket = Directories(world.settings).engine_socket
    socket.parent.mkdir(parents=True, exist_ok=True)
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    yield
    await runner.cleanup()
