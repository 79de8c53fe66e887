"""Responses in the pieces in which the app sends them."""

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.types import Message

from tests.api.support.world import World


async def stream(
    world: World, url: str, on_piece: Callable[[], Awaitable[None]] | None = None
) -> list[bytes]:
    """The pieces in which a body is sent, as a server would get them from the app."""
    parts = urlsplit(url)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "root_path": "",
        "query_string": parts.query.encode(),
        "headers": [(b"host", parts.netloc.encode())],
        "server": ("api", 80),
        "client": ("127.0.0.1", 1),
    }
    pieces: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            pieces.append(message["body"])
            if on_piece is not None:
                await on_piece()

    await world.app(scope, receive, send)
    return pieces
