"""Request rates of API keys, each a token bucket in this process."""

import math
import time
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class RequestRates:
    """Buckets of the keys that have a rate; a bucket per key that was ever used here."""

    def __init__(self) -> None:
        self._buckets: dict[OwnerId | None, _Bucket] = {}

    def admit(self, caller: Caller, now: float) -> None:
        """Take a token. Raises OverloadedError, with the time until there is one."""
        rate = caller.limits.requests_per_s
        if rate is None:
            return
        most = max(1.0, rate * BURST_S)
        bucket = self._buckets.setdefault(caller.owner, _Bucket(most, now))
        bucket.tokens = min(most, bucket.tokens + (now - bucket.filled_at) * rate)
        bucket.filled_at = now
        if bucket.tokens < 1:
            raise OverloadedError(
                f"key_requests_per_s: found more than {most:.6g} requests in {BURST_S:g} s, expected at most "
                f"{rate:.6g} a second from one API key: send this request again later",
                math.ceil((1 - bucket.tokens) / rate),
            )
        bucket.tokens -= 1


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
