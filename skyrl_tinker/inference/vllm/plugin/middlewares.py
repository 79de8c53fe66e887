"""Middlewares of our samplers: access control, and weight versions from another host."""

import asyncio
import json
import os
import secrets

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.inference.constants import PROBE, REPLICA, TOKEN
from skyrl_tinker.system.version_copies import VersionCopies

OPEN_PATH = "/health"
"""Route without a token, as the router requests it too."""
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_UPDATE, _BEGIN, _FINISH = "/update_weights", "/start_weight_update", "/finish_weight_update"


class TokenGuard:
    """ASGI middleware that answers 401 to requests without the token in the environment variable TOKEN.

    Other users of the machine can reach loopback, and the routes replace weights and call methods of the
    workers. Admitted answers have the server's address (REPLICA).
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


class VersionPull:
    """ASGI middleware that replaces a URL of a VersionServer by the path of a local copy, which it pulls.

    An adapter's copy is held until it is unloaded; a copy of full parameters until the next update begins or
    this one is finished, as the engine maps the files until then.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._copies = VersionCopies()
        self._adapters: dict[str, str] = {}  # URL by name
        self._weights: set[str] = set()  # URLs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PROBE:
            await Response(status_code=204)(scope, receive, send)
        elif path in (_LOAD, _UPDATE):
            await self._with_copies(scope, receive, send)
        elif path == _UNLOAD:
            await self._unload(scope, receive, send)
        elif path in (_BEGIN, _FINISH):
            await self._app(scope, receive, send)
            await self._release_weights()
        else:
            await self._app(scope, receive, send)

    async def _with_copies(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads(await read_body(receive))
        place, key = (
            (body, "lora_path") if scope["path"] == _LOAD else (body.get("update_info", {}), "directory")
        )
        url = place.get(key)
        if isinstance(url, str) and url.startswith("http://"):
            try:
                place[key] = str(await asyncio.to_thread(self._copies.hold, url))
            except OSError as error:
                await Response(f"{url} could not be pulled: {error}", 502)(scope, receive, send)
                return
            if scope["path"] == _UPDATE:
                self._weights.add(url)
            else:
                self._adapters[body["lora_name"]] = url
        await self._app(*with_body(scope, receive, json.dumps(body).encode()), send)

    async def _unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await read_body(receive)
        await self._app(*with_body(scope, receive, content), send)
        url = self._adapters.pop(json.loads(content)["lora_name"], None)
        if url is not None and url not in self._adapters.values():
            await asyncio.to_thread(self._copies.release, url)

    async def _release_weights(self) -> None:
        released, self._weights = self._weights, set()
        for url in released:
            await asyncio.to_thread(self._copies.release, url)


async def read_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """Return scope and messages of the same request with another body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return whole.pop() if whole else await receive()

    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, receive_body
