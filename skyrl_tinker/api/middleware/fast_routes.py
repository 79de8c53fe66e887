"""Dispatch without FastAPI for the requests that come with every sample, every pass and every heartbeat.

FastAPI's own work per request (matching routes one by one, resolving dependencies, several exception
stacks) costs more than everything that the API does for these.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api import error_responses

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _FastRequest(Request):
    """Request whose body has come as one message: Starlette joins parts of a stream."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body: bytes = (await self.receive())["body"]
        return self._body


class FastRoute(APIRoute):
    """POST route without path parameters, whose endpoint takes the request and the services."""

    def get_route_handler(self) -> Handler:
        async def handle(request: Request) -> Response:
            return _response(await self.endpoint(request, request.app.state.services))

        return handle


def _response(answer: Response | BaseModel) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(answer.model_dump_json(), media_type="application/json")


class FastPaths:
    """ASGI layer that calls endpoints of FastRoutes by path."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        fast = (each for each in routes if isinstance(each, FastRoute) and "POST" in each.methods)
        self._endpoints = {each.path: each.endpoint for each in fast}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = _FastRequest(scope, receive)
        try:
            answer = _response(await endpoint(request, scope["app"].state.services))
        except error_responses.EXPECTED as error:
            answer = error_responses.refusal(request, error)
        await answer(scope, receive, send)
