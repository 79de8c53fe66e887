"""Signed download URLs, which need no key until they expire.

The signature is HMAC-SHA256 (RFC 2104) over expiry and path, with a secret that all API processes share.
Expiry is by the clocks of the hosts that sign and serve.
"""

import hashlib
import hmac
import time
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from fastapi import Request

from skyrl_tinker.errors import ForbiddenError
from skyrl_tinker.store.cluster.signing_secrets import SigningSecrets

LIFE_S = 3600
_REMEDY = "request a new one from the server"


def expiry(at_most: float | None = None) -> int:
    """Return the time LIFE_S from now, or `at_most` if earlier, in seconds since the epoch."""
    latest = time.time() + LIFE_S
    return int(latest if at_most is None else min(latest, at_most))


class Signer:
    def __init__(self, signing: SigningSecrets, trust_forwarded: bool) -> None:
        """`trust_forwarded`: all requests come through a proxy that sets X-Forwarded-…."""
        self._signing = signing
        self._trust_forwarded = trust_forwarded

    def url(self, request: Request, path: str, expires: int) -> str:
        """Return the absolute URL at the address that this client used. `path` begins with /download/."""
        query = urlencode({"expires": expires, "signature": self._signature(path, str(expires))})
        return f"{self._address(request)}{quote(path)}?{query}"

    def require(self, request: Request) -> None:
        """Raise ForbiddenError, which says why, unless the URL carries our signature and has not expired."""
        expires = request.query_params.get("expires", "")
        signature = request.query_params.get("signature", "")
        if not expires or not signature:
            raise ForbiddenError(f"this URL lacks expires or signature: {_REMEDY}")
        expected = self._signature(request.scope["path"], expires)
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise ForbiddenError(
                f"this URL was changed, or not signed with this server's present secret: {_REMEDY}"
            )
        if time.time() >= int(expires):
            when = datetime.fromtimestamp(int(expires), UTC).isoformat()
            raise ForbiddenError(f"this URL expired at {when}: {_REMEDY}")

    def _signature(self, path: str, expires: str) -> str:
        text = f"{expires}\n{path}".encode()
        return hmac.new(self._signing.current.download, text, hashlib.sha256).hexdigest()

    def _address(self, request: Request) -> str:
        """Return scheme, host and prefix, without a trailing slash."""
        base = request.base_url
        if not self._trust_forwarded:
            return str(base).rstrip("/")
        scheme = _forwarded(request, "proto") or base.scheme
        host = _forwarded(request, "host") or base.netloc
        prefix = (_forwarded(request, "prefix") or "").strip("/")
        return f"{scheme}://{host}/{prefix}".rstrip("/")


def _forwarded(request: Request, name: str) -> str:
    """Return the value set by the proxy nearest to the client; empty if there is none."""
    return request.headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip()
