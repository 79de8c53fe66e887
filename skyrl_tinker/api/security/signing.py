"""URLs that work without a key for a while: signed, for downloads by whatever fetches a URL.

HMAC-SHA256 (RFC 2104) over expiry and path, with a secret of the store, which all API processes share.
"""

import hashlib
import hmac
import time
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from fastapi import Request

from skyrl_tinker.errors import ForbiddenError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import Store

LIFE_S = 3600
_SECRET = "download"
_ASK = "ask the server for a new one"


def expiry(at_most: float | None = None) -> int:
    """Seconds since the epoch: in an hour, or `at_most` if that comes first."""
    hour = time.time() + LIFE_S
    return int(hour if at_most is None else min(hour, at_most))


class Signer:
    def __init__(self, store: Store, trust_forwarded: bool) -> None:
        """`trust_forwarded`: a proxy that sets X-Forwarded-… is the only way to this server."""
        self._store = store
        self._trust_forwarded = trust_forwarded
        self._secret: bytes | None = None

    async def url(self, request: Request, path: str, expires: int) -> str:
        """Absolute, at the address by which this client reached us. `path` begins with /download/."""
        query = urlencode({"expires": expires, "signature": await self._signature(path, str(expires))})
        return f"{self._address(request)}{quote(path)}?{query}"

    async def require(self, request: Request) -> None:
        """Raises ForbiddenError, which says why, unless the request's URL is one of ours and not expired."""
        expires = request.query_params.get("expires", "")
        signature = request.query_params.get("signature", "")
        if not expires or not signature:
            raise ForbiddenError(f"this URL lacks expires or signature: {_ASK}")
        expected = await self._signature(request.scope["path"], expires)
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise ForbiddenError(f"this URL was changed, or another server signed it: {_ASK}")
        if time.time() >= int(expires):
            when = datetime.fromtimestamp(int(expires), UTC).isoformat()
            raise ForbiddenError(f"this URL expired at {when}: {_ASK}")

    async def _signature(self, path: str, expires: str) -> str:
        if self._secret is None:
            self._secret = await self._store.write(
                lambda conn: server_state.get_or_create_secret(conn, _SECRET)
            )
        return hmac.new(self._secret, f"{expires}\n{path}".encode(), hashlib.sha256).hexdigest()

    def _address(self, request: Request) -> str:
        """Scheme, host and prefix, without a slash at the end."""
        seen = request.base_url
        if not self._trust_forwarded:
            return str(seen).rstrip("/")
        scheme = _forwarded(request, "proto") or seen.scheme
        host = _forwarded(request, "host") or seen.netloc
        prefix = (_forwarded(request, "prefix") or "").strip("/")
        return f"{scheme}://{host}/{prefix}".rstrip("/")


def _forwarded(request: Request, name: str) -> str:
    """What the proxy next to the client set; empty if none did."""
    return request.headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip()
