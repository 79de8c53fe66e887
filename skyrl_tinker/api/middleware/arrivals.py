"""Training requests on their way, told to the engine: it fails a missing seq_id that nobody sends any more.

Told are those that take long to arrive or to be stored, and those that were lost or are to be tried again.
"""

import asyncio
import re
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from http import HTTPStatus

from sqlalchemy.exc import OperationalError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_tinker.api.middleware.compression import first_bytes
from skyrl_tinker.api.middleware.route_traits import Trait, has
from skyrl_tinker.domain.ids import ModelId, OwnerId
from skyrl_tinker.protocol.protobuf.size_guard import head
from skyrl_tinker.store.futures import expected_requests
from skyrl_tinker.store.futures.expected_requests import RETRY_S, Sender
from skyrl_tinker.store.store import Store

LOOK_S = 0.5
"""Longest time after which a request is told: far less than the engine waits."""
HOLD_S = 4.0
"""Time for which a request is told at once, so that the death of this process does not end it."""
_END_BYTES = 4096
_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([^"\\]+)"')
_TRIED_AGAIN = frozenset(
    {0, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
)  # 0: the client left, or this process ends


class Arrival:
    """Request that is being received or stored."""

    def __init__(self, owner: OwnerId | None, headers: Headers, began: float) -> None:
        self._owner = owner
        self._encoding = headers.get("content-encoding", "identity").strip().lower()
        self._start = self._last = b""
        self.began = began

    def note(self, part: bytes) -> None:
        """Keep the beginning and the end of the body: the SDK's JSON has data before the model."""
        if not self._start:
            self._start = part[:_END_BYTES]
        self._last = (self._last + part[-_END_BYTES:])[-_END_BYTES:]

    @property
    def sender(self) -> Sender:
        """Sender, without a model where no end of the body, as far as it is here, has one."""
        start, last = self._start, self._last
        if self._encoding != "identity":
            start, last = first_bytes(start, self._encoding), b""
        if fields := head(start):
            return Sender(self._owner, ModelId(fields[0]))
        named = _MODEL_ID.search(last) or _MODEL_ID.search(start)
        return Sender(self._owner, ModelId(named[1].decode(errors="replace")) if named else None)


class Arrivals:
    """Training requests on their way to this process, to `run` as a task."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._under_way: set[Arrival] = set()
        self._lost: dict[Sender, float] = {}  # until when they are expected again
        self._told: dict[Sender, float] = {}
        self._some = asyncio.Event()

    def begin(self, owner: OwnerId | None, headers: Headers) -> Arrival:
        arrival = Arrival(owner, headers, self._store.now())
        self._under_way.add(arrival)
        self._some.set()
        return arrival

    def end(self, arrival: Arrival, again_s: float | None = None) -> None:
        """Note an end. `again_s`: the client will most likely send it again, not before so long."""
        self._under_way.discard(arrival)
        if again_s is not None:
            self._lost[arrival.sender] = self._store.now() + again_s + RETRY_S

    async def run(self) -> None:
        """Tell the engine, by the store, until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(LOOK_S)
            with suppress(OperationalError):  # the database failed: told the next time
                await self.tell(self._store.now())
            if not self._under_way and not self._lost:
                self._some.clear()

    async def tell(self, now: float) -> None:
        """Note requests that have been under way for long, and lost ones."""
        self._told = {sender: until for sender, until in self._told.items() if until > now}
        slow = [arrival.sender for arrival in self._under_way if now - arrival.began >= LOOK_S]
        lost, self._lost = self._lost, {}
        until = dict.fromkeys(slow, now + HOLD_S) | lost
        new = {sender: at for sender, at in until.items() if at - self._told.get(sender, now) > HOLD_S / 2}
        if not new:
            return
        try:
            await self._store.write(partial(expected_requests.note, until=new))
        except OperationalError:
            self._lost = lost | self._lost
            raise
        self._told |= new


class ArrivalsMiddleware:
    """ASGI layer that tells Arrivals of training requests, those that other layers refuse included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        told = has(scope, Trait.TRAINING)
        return (self._tell if told else self._app)(scope, receive, send)

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrivals: Arrivals = scope["app"].state.services.arrivals
        arrival = arrivals.begin(scope.get("owner"), Headers(scope=scope))
        start: Message = {"status": 0, "headers": []}

        async def look() -> Message:
            message = await receive()
            arrival.note(message.get("body", b""))
            return message

        async def note(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        try:
            await self._app(scope, look, note)
        finally:
            arrivals.end(arrival, _again_s(start))


def _again_s(start: Message) -> float | None:
    """Return after how long a client sends a request again that was answered so; None: it does not."""
    status = start["status"]
    if status not in _TRIED_AGAIN and status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    retry_after = Headers(raw=start["headers"]).get("retry-after", "")
    return int(retry_after) if retry_after.isdecimal() else 0
