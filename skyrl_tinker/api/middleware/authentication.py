"""Authentication of requests, before their bodies are read."""

from collections.abc import Awaitable, Iterable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api.error_responses import not_allowed, shaped
from skyrl_tinker.api.middleware.route_traits import METRICS, Trait, has
from skyrl_tinker.api.security.keyring import KeyRing
from skyrl_tinker.api.security.tokens import InvalidTokenError
from skyrl_tinker.errors import UnauthenticatedError

OPEN_BELOW = ("/dashboard/", "/docs/", "/download/")
"""Prefixes of the pages of dashboard and documentation, and of downloads, whose URLs are signed."""
_READING = ("GET", "HEAD")
_BEARER = b"bearer "


class AuthMiddleware:
    """ASGI layer that sets scope["caller"] and scope["owner"], or answers 401.

    Open paths are read only: no stranger's body is received.
    """

    def __init__(self, app: ASGIApp, *, metrics_key: bool = False) -> None:
        """`metrics_key`: METRICS is not open."""
        self._app = app
        self._metrics_key = metrics_key

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._is_open(scope):
            if scope["method"] not in _READING:
                answer = not_allowed(scope["path"], scope["method"], ", ".join(_READING))
                return answer(scope, receive, send)
        elif scope["type"] == "http":
            keys: KeyRing = scope["app"].state.services.keys
            try:
                caller = keys.caller(credential(scope["headers"]), address(scope))
            except UnauthenticatedError as error:
                return _refusal(scope["path"], error)(scope, receive, send)
            scope["caller"], scope["owner"] = caller, caller.owner
        return self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        if scope["type"] != "http" or (self._metrics_key and scope["path"] == METRICS):
            return False
        return has(scope, Trait.OPEN) or scope["path"].startswith(OPEN_BELOW)


def address(scope: Scope) -> str:
    """Return the client's address, without its port."""
    client = scope.get("client")
    return client[0] if client else "unknown"


def credential(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return X-API-Key, else the token of `Authorization: Bearer`, which OpenAI's clients send."""
    bearer: str | None = None
    for name, value in headers:
        if name == b"x-api-key":
            return value.decode("latin-1")
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            bearer = value[len(_BEARER) :].decode("latin-1").strip()
    return bearer


def _refusal(path: str, error: UnauthenticatedError) -> JSONResponse:
    """Build the 401. `invalid_token` (RFC 6750) makes the SDK fetch a new JWT and retry once."""
    challenge = 'Bearer error="invalid_token"' if isinstance(error, InvalidTokenError) else "Bearer"
    return shaped(path, error, headers={"WWW-Authenticate": challenge})
