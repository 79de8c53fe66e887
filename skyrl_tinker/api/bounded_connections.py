"""Bounds on connections, in total and per address, and on what comes outside of bodies.

A head (or trailers, which the parser keeps, too) has HEAD_BYTES and HEAD_S: uvicorn bounds neither, so that
anybody could fill the memory with one, or hold thousands of connections with half-sent ones (Slowloris).
"""

import asyncio
from collections import Counter
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 64 * 1024
HEAD_S = 10.0
_LINGER_S = 1.0  # what is closed while data arrives is reset, and its client sees no answer


class ConnectionCaps:
    """Count of open connections, by address; shared by the connections of a process."""

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._open: Counter[str] = Counter()
        self._count = 0

    def admit(self, address: str) -> str | None:
        """Count a connection; None if it is within the caps, else why not. Each needs a `release`."""
        self._open[address] += 1
        self._count += 1
        if self._count > self._total:
            return f"found {self._total} connections, the server's setting max_connections"
        if self._open[address] > self._per_address:
            return (
                f"found {self._per_address} connections from this address, "
                "the server's setting max_connections_per_address"
            )
        return None

    def release(self, address: str) -> None:
        self._count -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class BoundedConnection(HttpToolsProtocol):
    """Uvicorn's connection under the bounds of this module."""

    def __init__(self, *args: Any, caps: ConnectionCaps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caps = caps
        self._address = ""
        self._outside = 0  # bytes since the parser last gave out a whole head or a part of a body
        self._in_head = True
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if (why := self._caps.admit(self._address)) is not None:
            self._refuse(503, why)
        else:
            self._limit_head_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._caps.release(self._address)
        self._end_head_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._outside += len(data)
        super().data_received(data)
        if self._outside > HEAD_BYTES:
            self._refuse(431, f"request head: found more than {HEAD_BYTES} bytes, expected at most so many")
        elif self._in_head and self._outside:
            self._limit_head_time()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._outside = 0
        self._in_head = False
        self._end_head_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._outside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._outside = 0
        super().on_message_complete()

    def _limit_head_time(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._refuse_late_head)

    def _end_head_time(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._refuse(408, f"request head: not complete after {HEAD_S:.0f} s")

    def _refuse(self, status: int, why: str) -> None:
        body = orjson.dumps({"detail": why})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self._refused = True
        self.transport.write(STATUS_LINE[status] + head + body)
        self.loop.call_later(_LINGER_S, self.transport.close)
