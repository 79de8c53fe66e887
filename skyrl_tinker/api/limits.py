"""Bounds on request bodies: bytes on the wire, bytes after decompression, nesting of JSON."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import orjson
import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.errors import TooLargeError, UserError

MAX_JSON_DEPTH = 64
_SMALLEST_SLICE = 64
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Caps in bytes."""

    wire: int
    expanded: int


class _Stream(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    open: Callable[[], _Stream]
    max_expansion: int  # bytes out per byte in


_CODECS = {
    # a block of 4 bytes can say "128 KiB of the same byte"
    "zstd": _Codec("zstd", lambda: zstandard.ZstdDecompressor().decompressobj(), 32768),
    "gzip": _Codec("gzip", lambda: zlib.decompressobj(wbits=31), 1032),
}


class ClientGoneError(Exception):
    """The client closed the connection before its body was complete."""


class BodyLimitMiddleware:
    """Reads the whole body under the caps, decompresses it, and hands it on as one message."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(MutableHeaders(scope=scope), receive)
        except ClientGoneError:
            return
        except UserError as error:
            refusal = JSONResponse({"detail": str(error)}, error.status)
            await refusal(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: MutableHeaders, receive: Receive) -> bytes:
        body = await _read_wire(headers, receive, self._limits.wire)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return body
        body = await asyncio.to_thread(decompress, body, encoding, self._limits.expanded)
        del headers["content-encoding"]
        headers["content-length"] = str(len(body))
        return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once and then whatever the server says (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _read_wire(headers: Headers, receive: Receive, cap: int) -> bytes:
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > cap:
        raise TooLargeError(f"request body: found {announced} bytes, expected at most {cap}")
    pieces: list[bytes] = []
    total = 0
    async for piece in _pieces(receive):
        total += len(piece)
        if total > cap:
            raise TooLargeError(f"request body: found more than {cap} bytes, expected at most {cap}")
        pieces.append(piece)
    return b"".join(pieces)


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("more_body", False)
        yield message.get("body", b"")


def decompress(body: bytes, encoding: str, cap: int) -> bytes:
    """The decompressed body. TooLargeError once it passes `cap` bytes, UserError when it is not intact."""
    codec = _CODECS.get(encoding)
    if codec is None:
        raise UserError(f"Content-Encoding: found {encoding!r}, expected zstd, gzip or identity")
    out: list[bytes] = []
    total = 0
    for piece in _expand(body, codec, cap):
        total += len(piece)
        if total > cap:
            raise TooLargeError(
                f"request body: {len(body)} bytes of {encoding} expand to more than {cap} bytes, the cap"
            )
        out.append(piece)
    return b"".join(out)


def _expand(body: bytes, codec: _Codec, cap: int) -> Iterator[bytes]:
    """Feeds slices so small that none of them can expand far beyond what is left of the cap."""
    stream = codec.open()
    start = 0
    left = cap
    while start < len(body) and not stream.eof:
        end = start + max(_SMALLEST_SLICE, left // codec.max_expansion)
        try:
            piece = stream.decompress(body[start:end])
        except (zstandard.ZstdError, zlib.error) as error:
            raise UserError(f"request body: not valid {codec.name}: {error}") from error
        start = end
        left = max(0, left - len(piece))
        yield piece
    if not stream.eof or stream.unused_data or start < len(body):
        raise UserError(f"request body: expected exactly one complete {codec.name} frame")


def parse_json(body: bytes) -> object:
    """The parsed body. UserError when it is not JSON or nested deeper than MAX_JSON_DEPTH."""
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError(f"request body: not valid JSON: {error}") from error
    _check_depth(body)
    return value


def _check_depth(body: bytes) -> None:
    """`body` is valid JSON. Each pass takes away the innermost level of brackets, at the speed of C."""
    brackets = _JSON_STRING.sub(b"", body).translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise UserError(f"request body: nested deeper than {MAX_JSON_DEPTH} levels")
