"""Access control of our vLLM servers, whose routes replace weights and call methods of their workers."""

import os
import secrets

from skyrl_tinker.inference.constants import REPLICA, TOKEN
from skyrl_tinker.inference.plugin.asgi import Application, Message, Receive, Send

OPEN_PATH = "/health"
"""Route without a token, as the router requests it too."""


class TokenGuard:
    """ASGI middleware that answers 401 to requests without the token in the environment variable TOKEN.

    Other users of the machine can reach loopback. Admitted answers have the server's address (REPLICA).
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._admits(scope):
            await self._app(scope, receive, _signed(send, scope))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"this server serves its skyrl-tinker alone"})

    def _admits(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] == OPEN_PATH or secrets.compare_digest(given, self._expected)


def _signed(send: Send, scope: Message) -> Send:
    """Return `send` with the server's address in the headers of answers."""
    host, port = scope["server"]
    name, address = REPLICA.lower().encode(), f"{host}:{port}".encode()

    async def sign(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (name, address)]
        await send(message)

    return sign
