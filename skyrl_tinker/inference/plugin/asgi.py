"""Bodies of requests in the middlewares."""

from starlette.types import Message, Receive, Scope


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
