"""Bounds on request bodies: bytes on the wire, bytes after decompression, bytes held at once."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.api import error_responses
from skyrl_tinker.api.middleware.arriving_body import LARGE_BYTES, WHOLE, ArrivingBody, Spool
from skyrl_tinker.api.middleware.byte_budget import ByteBudget
from skyrl_tinker.api.middleware.compression import decompress, first_bytes, most_expanded, require_known
from skyrl_tinker.api.middleware.route_traits import Trait, has
from skyrl_tinker.errors import OverloadedError, TooLargeError, UserError
from skyrl_tinker.protocol.protobuf.pass_results import PROTOBUF

_PROTOBUF = PROTOBUF.encode()
HEAD_BYTES = 192 * 1024
"""Bytes of a refused body that are decoded for its model_id and seq_id."""
_Fields = Mapping[bytes, bytes]
"""Headers by name, each of them once."""


class Caps(NamedTuple):
    """Largest size of one body in bytes, on the wire and expanded, and the name of the former."""

    wire: int
    expanded: int
    reason: str


SMALL = Caps(LARGE_BYTES, LARGE_BYTES, "of a request that counts for no rate")
"""Nothing that is held while a client waits takes from the budget, and nothing uncounted takes much."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Caps in bytes, of one body; `held`: of all large bodies, each way, and as much of RELAYED paths.

    `wire` and `expanded` are of protobuf; `json` is of other bodies, which take more memory once parsed.
    """

    wire: int
    expanded: int
    json: int
    held: int

    @property
    def of_protobuf(self) -> Caps:
        return Caps(self.wire, self.expanded, "setting bodies.wire_mb")

    @property
    def of_others(self) -> Caps:
        return Caps(min(self.json, self.wire), min(self.json, self.expanded), "setting bodies.json_mb")


class BodyTooLargeError(TooLargeError):
    """Refusal of a body over a cap. `head`: its first bytes, expanded."""

    def __init__(self, message: str, head: bytes) -> None:
        super().__init__(message)
        self.head = head


class BodyLimitMiddleware:
    """ASGI layer that reads a body under the caps, decompresses it, and passes it on as one message.

    It sets Content-Length. Large bodies that have arrived wait until the budget that all share allows them.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, spool: Path) -> None:
        """`spool`: directory for files of bodies.

        Of a refused body of a NUMBERED path the app gets the beginning, and the reason in scope["refused"].
        """
        self._app = app
        self._of_protobuf, self._of_others = limits.of_protobuf, limits.of_others
        self._spool = Spool(spool)
        self._wire, self._expanded = (
            {relayed: ByteBudget(limits.held) for relayed in (False, True)} for _ in range(2)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        fields = dict(reversed(scope["headers"]))  # of several with one name the first, as routes read them
        caps = self._caps(scope, fields)
        if _is_here(scope, fields, caps):
            message = await receive()
            if message["type"] == "http.request":
                await self._app(scope, _replay(message, receive), send)
            return
        async with AsyncExitStack() as held:
            try:
                body = await self._read(scope, fields, receive, caps, held)
            except ClientDisconnect:
                return
            except (UserError, OverloadedError) as error:
                if not isinstance(error, BodyTooLargeError) or not has(scope, Trait.NUMBERED):
                    await error_responses.refusal(Request(scope), error)(scope, receive, send)
                    return
                scope["refused"], body = str(error), error.head  # the error itself would keep the whole body
            if fields.get(b"content-length") != b"%d" % len(body) or b"content-encoding" in fields:
                headers = MutableHeaders(scope=scope)
                headers["content-length"] = str(len(body))
                del headers["content-encoding"]
            message = {"type": "http.request", "body": body, "more_body": False}
            await self._app(scope, _replay(message, receive), send)

    def _caps(self, scope: Scope, fields: _Fields) -> Caps:
        if has(scope, Trait.WAITING):
            return SMALL
        is_protobuf = fields.get(b"content-type", b"").startswith(_PROTOBUF)
        return self._of_protobuf if is_protobuf else self._of_others

    async def _read(
        self, scope: Scope, fields: _Fields, receive: Receive, caps: Caps, held: AsyncExitStack
    ) -> bytes:
        encoding = _encoding(fields)
        if encoding == "identity":
            return await self._read_wire(scope, fields, receive, caps, held)
        require_known(encoding)
        async with AsyncExitStack() as compressed:
            body = await self._read_wire(scope, fields, receive, caps, compressed)
            # Holders of wire bytes may wait for expanded bytes, never the other way round (deadlock).
            size = min(most_expanded(body, encoding), caps.expanded)
            if size > LARGE_BYTES:
                budget = self._expanded[has(scope, Trait.RELAYED)]
                share = await held.enter_async_context(budget.holding(size, scope.get("owner")))
                body = await asyncio.to_thread(_decompress, body, encoding, caps.expanded)
                budget.shrink(share, len(body))
            else:
                body = _decompress(body, encoding, caps.expanded)
        return body

    async def _read_wire(
        self, scope: Scope, fields: _Fields, receive: Receive, caps: Caps, held: AsyncExitStack
    ) -> bytes:
        size, owner = _content_length(fields), scope.get("owner")
        with ArrivingBody(receive, self._spool, owner) as body:
            if size is not None and size > caps.wire:
                await body.read(HEAD_BYTES)
                raise await _too_large(f"{size}", caps, fields, body)
            await body.read(caps.wire)
            if body.size > caps.wire:
                raise await _too_large(f"more than {caps.wire}", caps, fields, body)
            if body.size > LARGE_BYTES:
                budget = self._wire[has(scope, Trait.RELAYED)]
                await held.enter_async_context(budget.holding(body.size, owner))
            return await body.first_bytes(body.size)


def _decompress(body: bytes, encoding: str, cap: int) -> bytes:
    try:
        return decompress(body, encoding, cap)
    except TooLargeError as error:
        raise BodyTooLargeError(str(error), first_bytes(body, encoding)) from None


def _is_here(scope: Scope, fields: _Fields, caps: Caps) -> bool:
    """Return whether a body that is not compressed, and not large, has come whole: in one message."""
    if WHOLE not in scope.get("extensions", ()) or b"content-encoding" in fields:
        return False
    size = _content_length(fields)
    return size is not None and size <= min(caps.wire, LARGE_BYTES)


def _encoding(fields: _Fields) -> str:
    return fields.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()


def _content_length(fields: _Fields) -> int | None:
    """Return Content-Length; None for a chunked body."""
    length = fields.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) <= 18 else None


async def _too_large(size: str, caps: Caps, fields: _Fields, body: ArrivingBody) -> BodyTooLargeError:
    message = f"request body: found {size} bytes, expected at most {caps.wire} ({caps.reason})"
    encoding = _encoding(fields)
    start = await body.first_bytes(HEAD_BYTES)
    return BodyTooLargeError(message, start if encoding == "identity" else first_bytes(start, encoding))


def _replay(body: Message, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once and then the server's messages (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return body

    return replay
