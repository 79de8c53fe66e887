"""Refusal of foreign hosts and foreign web pages while a server has no keys.

A page in the user's browser reaches a server on loopback: blindly from its own origin, and, with a name that
it makes resolve to 127.0.0.1 (DNS rebinding), with all answers. Browsers tell by Host, Origin and Sec-Fetch-*
(W3C Fetch Metadata), which pages cannot set; SDKs and curl send no Origin. Pages know no keys, so a server
that has some needs no such check.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Collection, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api.error_responses import shaped
from skyrl_tinker.api.security.keyring import KeyRing
from skyrl_tinker.errors import ForbiddenError
from skyrl_tinker.redaction import redact

ANY = "*"
MOST_NAMES = 256
_REMEDY = "add it to the setting allowed_hosts, or make an API key with `skyrl-tinker keys create`"


class OwnHostsMiddleware:
    """ASGI layer that answers 403 to foreign hosts and pages until the first key exists."""

    def __init__(self, app: ASGIApp, host: str, allowed: Collection[str]) -> None:
        """`host`: where the server listens. `allowed`: further names, also of pages; with ANY no check."""
        self._app = app
        self._allowed = frozenset(map(str.lower, allowed))
        self._own = self._allowed | {"localhost", socket.gethostname().lower(), host.lower()}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and ANY not in self._allowed:
            keys: KeyRing = scope["app"].state.services.keys
            if not keys.locked and (why := self._objection(scope["method"], dict(scope["headers"]))):
                return shaped(scope["path"], ForbiddenError(why))(scope, receive, send)
        return self._app(scope, receive, send)

    def _objection(self, method: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Return why a request is foreign, None if it is ours."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_own(_name(host.lower())):
            return f"Host: found {redact(host)!r}, which is not a name of this server: {_REMEDY}"
        origin = headers.get(b"origin")
        if origin is not None:
            return self._objection_to_page(origin.decode("latin-1"), host)
        site = headers.get(b"sec-fetch-site", b"none")
        follows_link = method == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
        if site not in (b"none", b"same-origin") and not follows_link:
            return "Sec-Fetch-Site: found another web page's request, expected this server's own pages"
        return None

    def _is_own(self, name: str) -> bool:
        """Accept our names, and any address: those are not resolved, so no page can redirect them."""
        return name in self._own or _is_address(name)

    def _objection_to_page(self, origin: str, host: str) -> str | None:
        netloc = _netloc(origin.lower())
        if netloc == host.lower() or _name(netloc) in self._allowed:
            return None
        return f"Origin: found {redact(origin)!r}, expected this server's own pages: {_REMEDY}"


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets without an address
        return ""


def _name(netloc: str) -> str:
    """Return the host without its port and brackets."""
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0]


@lru_cache(MOST_NAMES)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
