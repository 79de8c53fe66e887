"""Refusal of requests by the rate of their key, and of new work by the room on the disks."""

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api.error_responses import refusal
from skyrl_tinker.api.middleware.route_traits import Trait, has
from skyrl_tinker.errors import OverloadedError


class AdmissionMiddleware:
    """ASGI layer behind authentication that answers 429 or 503 before the body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if "caller" in scope and not has(scope, Trait.WAITING):
                await scope["app"].state.services.rates.admit(scope["caller"])
            if has(scope, Trait.NEW_WORK):
                await scope["app"].state.services.room.require()
        except OverloadedError as error:
            await refusal(Request(scope), error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
