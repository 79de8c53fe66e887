"""Refusal of requests by the rate of their key, and of new work by the room on the disks."""

from collections.abc import Awaitable

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api.error_responses import refusal
from skyrl_tinker.api.middleware.route_traits import Trait, has
from skyrl_tinker.errors import OverloadedError


class AdmissionMiddleware:
    """ASGI layer behind authentication that answers 429 or 503 before the body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        counts = "caller" in scope and not has(scope, Trait.WAITING)
        return (self._admit if counts else self._app)(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = scope["app"].state.services
        try:
            await services.rates.admit(scope["caller"])
            if has(scope, Trait.NEW_WORK):
                await services.room.require()
        except OverloadedError as error:
            await refusal(Request(scope), error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
