"""Request rates of API keys, each a token bucket in a file that the API processes of a host share."""

import fcntl
import math
import os
import struct
import time
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.domain.ids import OwnerId
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


_BUCKET = struct.Struct("dd")  # tokens, when they were counted


class RequestRates:
    """Buckets of the keys that have a rate; an open file per key that was ever used here."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[OwnerId | None, int] = {}

    def admit(self, caller: Caller, now: float) -> None:
        """Take a token at `now`, of the clock that is the same in all processes of a host.

        Raises OverloadedError, with the time until there is one.
        """
        rate = caller.limits.requests_per_s
        if rate is None:
            return
        most = max(1.0, rate * BURST_S)
        tokens = self._take(caller.owner, rate, most, now)
        if tokens < 1:
            raise OverloadedError(
                f"key_requests_per_s: found more than {most:.6g} requests in {BURST_S:g} s, expected at most "
                f"{rate:.6g} a second from one API key: send this request again later",
                math.ceil((1 - tokens) / rate),
            )

    def _take(self, owner: OwnerId | None, rate: float, most: float, now: float) -> float:
        """Return how many tokens there were; take one unless they were less than one."""
        file = self._file(owner)
        fcntl.flock(file, fcntl.LOCK_EX)  # others hold it for microseconds
        try:
            found = os.pread(file, _BUCKET.size, 0)
            left, counted_at = _BUCKET.unpack(found) if found else (most, now)
            tokens = min(most, left + max(0.0, now - counted_at) * rate)
            os.pwrite(file, _BUCKET.pack(tokens - 1 if tokens >= 1 else tokens, max(now, counted_at)), 0)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
        return float(tokens)

    def _file(self, owner: OwnerId | None) -> int:
        if owner not in self._files:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._directory / str(owner)
            self._files[owner] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._files[owner]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


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
