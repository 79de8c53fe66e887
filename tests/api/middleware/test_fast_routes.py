"""Requests that pass by the router: those of fast routes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api import error_responses
from skyrl_tinker.api.middleware.fast_routes import FastPaths, FastRoute
from skyrl_tinker.errors import UserError
from tests.api.support.world import World

fast, inner, outer = APIRouter(route_class=FastRoute), APIRouter(), APIRouter()


class Found(BaseModel):
    name: str


@fast.post("/echo")
async def echo(request: Request, services: Mapping[str, Any]) -> Found:
    if (body := (await request.body()).decode()) == "wrong":
        raise UserError("found wrong")
    return Found(name=services[body])


@inner.post("/plain/{name}")
async def plain(name: str) -> Found:
    return Found(name=name)


inner.include_router(fast, prefix="/fast")
outer.include_router(inner, prefix="/inner")


class _Asked:
    """Count of the requests that come to the router."""

    def __init__(self, app: ASGIApp, asked: Counter[str]) -> None:
        self._app = app
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asked[scope["path"]] += 1
        await self._app(scope, receive, send)


async def test_the_router_is_asked_for_no_fast_path() -> None:
    asked: Counter[str] = Counter()
    app = FastAPI()
    app.state.services = {"a": "alice", "b": "bob"}
    error_responses.install(app)
    app.mount("/files", PlainTextResponse("file"))
    app.include_router(outer, prefix="/api")

    app.add_middleware(_Asked, asked=asked)
    app.add_middleware(FastPaths, routes=app.routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        for body, name in (("a", "alice"), ("b", "bob")):
            assert (await http.post("/api/inner/fast/echo", content=body)).json() == {"name": name}
        refused = await http.post("/api/inner/fast/echo", content="wrong")
        assert (refused.status_code, refused.json()["detail"]) == (400, "found wrong")
        assert not asked
        assert (await http.get("/api/inner/fast/echo")).status_code == 405
        for name in ("x", "y"):
            assert (await http.post(f"/api/inner/plain/{name}")).json() == {"name": name}
        assert (await http.get("/files/a")).text == "file"
    assert asked["/api/inner/plain/x"] == asked["/api/inner/plain/y"] == asked["/files/a"] == 1


async def test_requests_of_each_sample_pass_and_heartbeat_have_fast_routes(world: World) -> None:
    passes = ("forward", "forward_backward", "optim_step")
    names = ("asample", *passes, "retrieve_future", "session_heartbeat")
    fast_ones = {route.path for route in world.app.routes if isinstance(route, FastRoute)}
    assert fast_ones == {f"/api/v1/{name}" for name in names}
