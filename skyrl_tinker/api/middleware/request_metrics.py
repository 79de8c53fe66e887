"""Times of requests, by route."""

import time
from collections.abc import Iterable

from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.api.api_metrics import ApiMetrics

OTHER = "other"
"""Label of methods and paths that are none of ours; clients choose them, so they are no labels."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STATUSES = ("none", "1xx", "2xx", "3xx", "4xx", "5xx")
"""Classes of statuses; none: the client left before there was an answer."""


class RequestMetricsMiddleware:
    """ASGI layer before all others, so that refusals and answers of FastPaths count, too.

    A route is told by its template. A request that was refused before it was routed counts under its path if
    a route without parameters has it, else under OTHER.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._fixed = frozenset(
            each.path for each in routes if isinstance(each, Route) and "{" not in each.path
        )
        self._mounted = {each.path: f"{each.path}/{{path}}" for each in routes if isinstance(each, Mount)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics: ApiMetrics = scope["app"].state.services.metrics
        path, status, began = scope["path"], 0, time.perf_counter()

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:  # raised again: Starlette's outermost layer answers it, with 500
            status = status or 500
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            route = path if path in self._fixed else self._template(scope)
            metrics.requested(method, route, _STATUSES[status // 100], time.perf_counter() - began)

    def _template(self, scope: Scope) -> str:
        """Return the template of the route that the router has put into the scope."""
        route = scope.get("route")
        if isinstance(route, Route):
            return route.path
        return self._mounted.get(scope.get("root_path", ""), OTHER)
