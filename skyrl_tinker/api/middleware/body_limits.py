"""Bounds on request bodies: bytes on the wire, bytes after decompression, bytes held at once."""

import asyncio
import io
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.api.middleware.byte_budget import ByteBudget
from skyrl_tinker.api.middleware.compression import decompress, first_bytes, most_expanded, require_known
from skyrl_tinker.errors import TooLargeError, TooSlowError, UserError

LARGE_BYTES = 256 * 1024
"""Bodies up to this are not waited for: heartbeats and samples go past those that wait."""
HEAD_BYTES = 192 * 1024
"""So much of a refused body is looked at."""
SLOWEST_BYTES_PER_S = 100_000
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Caps in bytes of one body, and of all large ones together (`held` as they come, as much expanded)."""

    wire: int
    expanded: int
    held: int


class BodyTooLargeError(TooLargeError):
    """`head`: how the body begins, expanded."""

    def __init__(self, message: str, head: bytes) -> None:
        super().__init__(message)
        self.head = head


class ClientGoneError(Exception):
    """The client closed the connection before its body was complete."""


class BodyLimitMiddleware:
    """Reads the whole body under the caps, decompresses it, and hands it on as one message, its length told.

    Large bodies wait, unread, until there is room for them beside the others.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, numbered: frozenset[str] = frozenset()) -> None:
        """`numbered`: paths whose requests count although they are refused. The app gets what such a body
        begins with, and in scope["refused"] why."""
        self._app = app
        self._limits = limits
        self._numbered = numbered
        self._wire = ByteBudget(limits.held)
        self._expanded = ByteBudget(limits.held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        async with AsyncExitStack() as held:
            headers = MutableHeaders(scope=scope)
            try:
                body = await self._read(headers, receive, held)
            except ClientGoneError:
                return
            except UserError as error:
                if not isinstance(error, BodyTooLargeError) or scope["path"] not in self._numbered:
                    refusal = JSONResponse({"detail": str(error)}, error.status)
                    await refusal(scope, receive, send)
                    return
                scope["refused"], body = str(error), error.head  # with its trace it would hold all that came
            headers["content-length"] = str(len(body))
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: MutableHeaders, receive: Receive, held: AsyncExitStack) -> bytes:
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return await self._read_wire(headers, receive, held)
        require_known(encoding)
        async with AsyncExitStack() as compressed:
            body = await self._read_wire(headers, receive, compressed)
            # Who holds wire bytes may wait for expanded ones, never the other way round.
            size = min(most_expanded(body, encoding), self._limits.expanded)
            share = await held.enter_async_context(self._expanded.holding(size))
            body = await asyncio.to_thread(self._decompress, body, encoding)
            self._expanded.shrink(share, len(body))
        del headers["content-encoding"]
        return body

    def _decompress(self, body: bytes, encoding: str) -> bytes:
        try:
            return decompress(body, encoding, self._limits.expanded)
        except TooLargeError as error:
            raise BodyTooLargeError(str(error), first_bytes(body, encoding)) from None

    async def _read_wire(self, headers: Headers, receive: Receive, held: AsyncExitStack) -> bytes:
        cap = self._limits.wire
        size = _announced(headers)
        body = _Body(receive)
        if size is not None and size > cap:
            await body.read(HEAD_BYTES)
            raise _too_large(f"{size}", cap, headers, body)
        if size is None or size <= LARGE_BYTES:
            await body.read(LARGE_BYTES)
        if body.more:
            share = await held.enter_async_context(self._wire.holding(size or cap))
            await _in_time(body.read(cap), size or cap)
            self._wire.shrink(share, body.size)
        if body.size > cap:
            raise _too_large(f"more than {cap}", cap, headers, body)
        return body.value()


class _Body:
    """What came so far. `more`: the rest is still to come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._data = io.BytesIO()
        self.more = True

    @property
    def size(self) -> int:
        return self._data.tell()

    def value(self) -> bytes:
        return self._data.getvalue()  # not copied

    async def read(self, most: int) -> None:
        """Until the end, or until there are more than `most` bytes."""
        while self.more and self.size <= most:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self.more = message.get("more_body", False)
            self._data.write(message.get("body", b""))


def _announced(headers: Headers) -> int | None:
    """Content-Length, which chunked bodies do not have."""
    announced = headers.get("content-length", "")
    if not announced.isdecimal() or len(announced) > 18:  # more no server lets through
        return None
    return int(announced)


def _too_large(found: str, cap: int, headers: Headers, body: _Body) -> BodyTooLargeError:
    message = f"request body: found {found} bytes, expected at most {cap} (the server's setting wire_body_mb)"
    encoding = headers.get("content-encoding", "identity").strip().lower()
    start = body.value()[:HEAD_BYTES]
    return BodyTooLargeError(message, start if encoding == "identity" else first_bytes(start, encoding))


async def _in_time(reading: Coroutine[None, None, None], size: int) -> None:
    """Who holds room for a body must send it: others wait."""
    within = GRACE_S + size / SLOWEST_BYTES_PER_S
    try:
        async with asyncio.timeout(within):
            await reading
    except TimeoutError:
        raise TooSlowError(
            f"request body: {size} bytes did not come within {within:.0f} s, "
            f"expected at least {SLOWEST_BYTES_PER_S // 1000} kB/s"
        ) from None


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
