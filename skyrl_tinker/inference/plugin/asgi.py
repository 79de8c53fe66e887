"""ASGI of the middlewares: its types, and the bodies of requests."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


async def read_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def with_body(scope: Message, receive: Receive, body: bytes) -> tuple[Message, Receive]:
    """Return scope and messages of the same request with another body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return whole.pop() if whole else await receive()

    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, receive_body
