"""Access control of our samplers, whose routes replace weights and call methods of their workers."""

import os
import secrets

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.inference.constants import REPLICA, TOKEN

OPEN_PATH = "/health"
"""Route without a token, as the router requests it too."""


class TokenGuard:
    """ASGI middleware that answers 401 to requests without the token in the environment variable TOKEN.

    Other users of the machine can reach loopback. Admitted answers have the server's address (REPLICA).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._admits(scope):
            await self._app(scope, receive, _signed(send, scope))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await Response("this server serves its skyrl-tinker alone", 401)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] == OPEN_PATH or secrets.compare_digest(given, self._expected)


def _signed(send: Send, scope: Scope) -> Send:
    """Return `send` with the server's address in the headers of answers."""
    host, port = scope["server"]
    name, address = REPLICA.lower().encode(), f"{host}:{port}".encode()

    async def sign(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (name, address)]
        await send(message)

    return sign
