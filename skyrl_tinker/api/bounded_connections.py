"""Bounds on connections: their number, in total and per address, their memory and their time.

A head (or trailers, which the parser keeps, too) has HEAD_BYTES and HEAD_S: uvicorn bounds neither, so that
anybody could fill the memory with one, or hold thousands of connections with half-sent ones (Slowloris).
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import orjson
from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from skyrl_tinker.api.middleware.arriving_body import WHOLE
from skyrl_tinker.domain.units import KiB, MiB

HEAD_BYTES = 64 * 1024
HEAD_S = 10.0
ALL_HEADS_BYTES, SMALL_HEAD_BYTES = 16 * MiB, 4096
"""Most of all heads that are not complete, without the first bytes of each."""
SMALL_BODY_BYTES, SMALL_BODY_S = 64 * KiB, 0.02
"""A body, and the time in which its request is not begun without it: the SDK sends head and body apart.

Uvicorn reads no more of a body until its request is begun.
"""
REST_S = 30.0
"""Time for the rest of a body whose request is answered already: it is thrown away."""
UNREAD_S = 60.0
"""Time in which a client must read a part of an answer that fills the buffers on its way."""
READ_BYTES = 64 * 1024
"""Most that is read from a connection before others have their turn."""
_FIRST_REQUEST_S = 0.5
"""Time for a new connection's request to arrive at a process that ends."""
_OTHER_EVENTS = ("connection_made", "connection_lost", "eof_received", "pause_writing", "resume_writing")
"""Of a connection, beside data that arrives."""
_LINGER_S = 1.0  # a socket closed while data arrives is reset, and its client sees no answer


def source(address: str) -> str:
    """Return the key that connections are counted by: an IPv4 address, or the /64 of an IPv6 host."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


class ConnectionCaps:
    """Count of open connections, by address; shared by the connections of a process.

    An address alone may have `per_address` of `total`. Beside others it may have the same multiple of the
    free places, so that newcomers find some: by default two that want all leave a third.
    """

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = min(per_address, total)
        self._open: Counter[str] = Counter()
        self._count = 0
        self._heads = 0  # bytes

    def resize_head(self, before: int, now: int) -> bool:
        """Count the bytes that a head takes; return whether it may take them. 0 ends it."""
        self._heads += max(0, now - SMALL_HEAD_BYTES) - max(0, before - SMALL_HEAD_BYTES)
        return now <= SMALL_HEAD_BYTES or self._heads <= ALL_HEADS_BYTES

    def admit(self, address: str) -> str | None:
        """Count a connection, which then needs a `release`, and return None; or return why it is refused."""
        own, free = self._open[address], self._total - self._count
        if free <= 0:
            return f"found {self._total} connections, the server's setting connections.total"
        if own * (self._total - self._per_address) >= self._per_address * free:
            return (
                f"found {own} connections from this address and {self._count - own} from others, "
                f"the server's setting connections.per_address: {self._per_address}, fewer beside others"
            )
        self._open[address] += 1
        self._count += 1
        return None

    def release(self, address: str) -> None:
        self._count -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class Connections:
    """Factory of connections that read no more than READ_BYTES at once, through one buffer.

    A plain `asyncio.Protocol` gets 256 KB at once from uvloop: 50 MB from 200 clients that send large bodies.
    """

    def __init__(self, caps: ConnectionCaps) -> None:
        self._caps = caps
        self._buffer = bytearray(READ_BYTES)

    def __call__(self, **uvicorn: Any) -> asyncio.BufferedProtocol:
        """Return a new connection; the arguments are those of uvicorn's."""
        return _SmallReads(_Http(**uvicorn, caps=self._caps), self._buffer)


class _SmallReads(asyncio.BufferedProtocol):
    """Connection that hands on the bytes read into a buffer, which is free again for the next one."""

    def __init__(self, http: "_Http", buffer: bytearray) -> None:
        self._http = http
        self._buffer = memoryview(buffer)
        for name in _OTHER_EVENTS:
            setattr(self, name, getattr(http, name))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._http.data_received(bytes(self._buffer[:nbytes]))


class _Http(HttpToolsProtocol):
    """Uvicorn's connection under the bounds of this module."""

    def __init__(self, *args: Any, caps: ConnectionCaps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caps = caps
        self._address: str | None = None  # once counted
        self._outside = 0  # bytes since the parser last gave out a whole head or a part of a body
        self._held = 0  # of them, as counted by the caps
        self._in_head = True
        self._in_body = False
        self._refused = False
        self._is_last = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unbegun: tuple[RequestResponseCycle, Any] | None = None  # its body is to come first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = source(self.client[0]) if self.client else ""
        if (why := self._caps.admit(address)) is not None:
            self._refuse(503, why)
        else:
            self._address = address
            self._arm("head", HEAD_S, self._refuse_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._caps.release(self._address)
        self._caps.resize_head(self._held, 0)
        self._disarm(*self._timers)
        super().connection_lost(exc)
        self._begin()  # it receives the disconnect

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._outside += len(data)
        super().data_received(data)
        before, self._held = self._held, self._outside
        has_room = self._caps.resize_head(before, self._held)
        if self._outside > HEAD_BYTES:
            self._refuse(431, f"request head: found more than {HEAD_BYTES} bytes, expected at most so many")
        elif not has_room:
            self._refuse(503, f"request head: {ALL_HEADS_BYTES // MiB} MiB of heads are not complete")
        elif self._in_head and self._outside:
            self._arm("head", HEAD_S, self._refuse_late_head)
        self._bound_wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._outside = 0
        self._in_head = False
        self._in_body = True
        if self._timers:
            self._disarm("head", "first")
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._outside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._outside = 0
        self._in_body = False
        self.scope["extensions"] = {WHOLE: {}}
        if self._timers:
            self._disarm("rest")
        super().on_message_complete()
        self._begin()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.more_body and not cycle.waiting_for_100_continue and _has_small_body(cycle.scope["headers"]):
            self._unbegun = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _bound_wait(self) -> None:
        if self._unbegun is not None:
            self._arm("body", SMALL_BODY_S, self._begin)

    def _begin(self) -> None:
        """Begin the request that waits for its body, if there is one."""
        self._disarm("body")
        if self._unbegun is not None:
            unbegun, self._unbegun = self._unbegun, None
            super()._start_asgi_task(*unbegun)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._bound_wait()
        if self._in_body and self.cycle.response_complete:
            self._arm("rest", REST_S, self.transport.close)

    def shutdown(self) -> None:
        """Close it after its answer; a client that was just let in has one request answered."""
        if self.cycle is not None:
            super().shutdown()
        else:
            self._is_last = True
            self._arm("first", _FIRST_REQUEST_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm("unread", UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm("unread")

    def _arm(self, name: str, seconds: float, expire: Callable[[], None]) -> None:
        """Start this timer unless it runs."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, expire)

    def _disarm(self, *names: str) -> None:
        for name in names:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

    def _refuse_late_head(self) -> None:
        self._refuse(408, f"request head: not complete after {HEAD_S:.0f} s")

    def _refuse(self, status: int, why: str) -> None:
        body = orjson.dumps({"detail": why})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self._refused = True
        self.parser = HttpRequestParser(self)  # drops the bytes held of the head
        self.headers = []
        self.transport.write(STATUS_LINE[status] + head + body)
        self.loop.call_later(_LINGER_S, self.transport.close)


def _has_small_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    length = next((value for name, value in headers if name == b"content-length"), b"")
    return length.isdigit() and len(length) < 6 and int(length) <= SMALL_BODY_BYTES
