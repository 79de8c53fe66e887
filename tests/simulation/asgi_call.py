"""Requests to an app, without HTTP: as ASGITransport of httpx makes them, whose objects cost more."""

import asyncio
import json
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

ROOT = "/api/v1/"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """`path`: below ROOT."""

    method: str
    path: str
    content: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    @property
    def scope(self) -> dict[str, Any]:
        path = ROOT + self.path
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "headers": [(b"host", b"localhost"), *self.headers],
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "server": ("localhost", None),
            "client": ("127.0.0.1", 123),
            "root_path": "",
        }

    @property
    def messages(self) -> Iterator[Mapping[str, Any]]:
        yield {"type": "http.request", "body": self.content, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}


@dataclass(slots=True, eq=False)
class Answer:
    """`again`: how often its request was repeated, as its client knows."""

    status_code: int = 500
    content_type: str = ""
    content: bytes = b""
    again: int | None = None

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.content)


async def call(app: ASGIApp, request: HttpRequest) -> Answer:
    """Return the answer; an error that the app raises is a 500."""
    answer, messages, ended = Answer(), request.messages, asyncio.Event()

    async def receive() -> Mapping[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status_code = message["status"]
            answer.content_type = dict(message["headers"]).get(b"content-type", b"").decode()
        elif message["type"] == "http.response.body":
            assert not ended.is_set()
            answer.content += message.get("body", b"")
            if not message.get("more_body", False):
                ended.set()

    try:
        await app(request.scope, receive, send)  # type: ignore[arg-type]
    except Exception:  # whatever it is: the answer may have been sent before
        return answer
    assert ended.is_set()
    return answer
