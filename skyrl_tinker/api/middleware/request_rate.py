"""Request rates of API keys, each a token bucket in a file that the API processes of this host share."""

import fcntl
import math
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.errors import OverloadedError
from skyrl_tinker.protocol.schemas.openai import error_body

BURST_S = 10.0
"""A bucket holds the tokens of so many seconds: clients send in bursts."""
UNCOUNTED = frozenset(
    f"/api/v1/{name}"
    for name in (
        "retrieve_future",
        "retrieve_futures",
        "session_heartbeat",
        "telemetry",
        "auth/token",
        "client/config",
        "client/dynamic_config",
        "console/now",
    )
)
"""Requests that wait, or that SDK and dashboard send by themselves: the SDK fails of some."""


_BUCKET = struct.Struct(
    "dd"
)  # tokens, and the time of the system's monotonic clock at which they were counted


class RequestRates:
    """Buckets of the keys that have a rate, by the number of the key."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file: int | None = None  # opened for the first key that has a rate

    def admit(self, caller: Caller, now: float) -> None:
        """Take a token. Raises OverloadedError, with the time until there is one."""
        rate = caller.limits.requests_per_s
        if rate is None:
            return
        most = max(1.0, rate * BURST_S)
        with self._locked() as file:
            place = _BUCKET.size * (caller.owner or 0)
            tokens, filled_at = _read(file, place) or (most, now)
            passed = now - filled_at if now >= filled_at else math.inf  # the system was started again
            tokens = min(most, tokens + passed * rate)
            short = tokens < 1
            os.pwrite(file, _BUCKET.pack(tokens if short else tokens - 1, now), place)
        if short:
            raise OverloadedError(
                f"key_requests_per_s: found more than {most:.6g} requests in {BURST_S:g} s, expected at most "
                f"{rate:.6g} a second from one API key: send this request again later",
                math.ceil((1 - tokens) / rate),
            )

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # microseconds
        try:
            yield self._file
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _read(file: int, place: int) -> tuple[float, float] | None:
    """Return a bucket, None where it was never written."""
    content = os.pread(file, _BUCKET.size, place)
    tokens, filled_at = _BUCKET.unpack(content) if len(content) == _BUCKET.size else (0.0, 0.0)
    return (tokens, filled_at) if filled_at else None


class RequestRateMiddleware:
    """ASGI layer behind authentication that answers 429 before the body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | None = scope.get("caller")
        if caller is not None and scope["path"] not in UNCOUNTED:
            rates: RequestRates = scope["app"].state.services.rates
            try:
                rates.admit(caller, time.monotonic())
            except OverloadedError as error:
                await _refusal(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(path: str, error: OverloadedError) -> JSONResponse:
    body = error_body(error) if path.startswith("/oai/") else {"detail": str(error)}
    return JSONResponse(body, error.status, {"Retry-After": str(error.retry_after_s)})
