"""Bounds on request bodies: bytes on the wire, bytes after decompression, bytes held at once."""

import asyncio
import io
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.api.middleware.byte_budget import ByteBudget
from skyrl_tinker.api.middleware.compression import decompress, first_bytes, most_expanded, require_known
from skyrl_tinker.errors import TooLargeError, TooSlowError, UserError

LARGE_BYTES = 256 * 1024
"""Bodies up to this size need no budget: heartbeats and samples overtake large bodies that wait for one."""
HEAD_BYTES = 192 * 1024
"""Bytes of a refused body that are decoded for its model_id and seq_id."""
SLOWEST_BYTES_PER_S = 100_000
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Caps in bytes: of one body on the wire and expanded; `held`: of all large bodies, each way."""

    wire: int
    expanded: int
    held: int


class BodyTooLargeError(TooLargeError):
    """Refusal of a body over a cap. `head`: its first bytes, expanded."""

    def __init__(self, message: str, head: bytes) -> None:
        super().__init__(message)
        self.head = head


class BodyLimitMiddleware:
    """ASGI layer that reads a body under the caps, decompresses it, and passes it on as one message.

    It sets Content-Length. Large bodies wait, unread, until the budget that all of them share allows them.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, numbered: frozenset[str] = frozenset()) -> None:
        """`numbered`: paths whose requests consume a seq_id even when refused.

        For these the app gets the beginning of the body, and the reason in scope["refused"].
        """
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
            except ClientDisconnect:
                return
            except UserError as error:
                if not isinstance(error, BodyTooLargeError) or scope["path"] not in self._numbered:
                    refusal = JSONResponse({"detail": str(error)}, error.status)
                    await refusal(scope, receive, send)
                    return
                scope["refused"], body = str(error), error.head  # the error itself would keep the whole body
            headers["content-length"] = str(len(body))
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: MutableHeaders, receive: Receive, held: AsyncExitStack) -> bytes:
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return await self._read_wire(headers, receive, held)
        require_known(encoding)
        async with AsyncExitStack() as compressed:
            body = await self._read_wire(headers, receive, compressed)
            # Holders of wire bytes may wait for expanded bytes, never the other way round (deadlock).
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
        size = _content_length(headers)
        body = _Body(receive)
        if size is not None and size > cap:
            await body.read(HEAD_BYTES)
            raise _too_large(f"{size}", cap, headers, body)
        if size is None or size <= LARGE_BYTES:
            await body.read(LARGE_BYTES)
        if body.more:
            share = await held.enter_async_context(self._wire.holding(size or cap))
            await _within_deadline(body.read(cap), size or cap)
            self._wire.shrink(share, body.size)
        if body.size > cap:
            raise _too_large(f"more than {cap}", cap, headers, body)
        return body.value()


class _Body:
    """Received part of a body. `more`: the client has not sent the rest yet."""

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
        """Receive until the body ends or has more than `most` bytes."""
        while self.more and self.size <= most:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.more = message.get("more_body", False)
            self._data.write(message.get("body", b""))


def _content_length(headers: Headers) -> int | None:
    """Return Content-Length; None for a chunked body."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) <= 18 else None


def _too_large(size: str, cap: int, headers: Headers, body: _Body) -> BodyTooLargeError:
    message = f"request body: found {size} bytes, expected at most {cap} (the server's setting wire_body_mb)"
    encoding = headers.get("content-encoding", "identity").strip().lower()
    start = body.value()[:HEAD_BYTES]
    return BodyTooLargeError(message, start if encoding == "identity" else first_bytes(start, encoding))


async def _within_deadline(reading: Coroutine[None, None, None], size: int) -> None:
    """Await `reading`; TooSlowError when it takes too long: its share of the budget keeps others waiting."""
    within = GRACE_S + size / SLOWEST_BYTES_PER_S
    try:
        async with asyncio.timeout(within):
            await reading
    except TimeoutError:
        raise TooSlowError(
            f"request body: {size} bytes did not arrive within {within:.0f} s, "
            f"expected at least {SLOWEST_BYTES_PER_S // 1000} kB/s"
        ) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once and then the server's messages (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
