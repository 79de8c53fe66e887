"""JWTs: what the SDK trades its API key for, and sends in its place while it lasts.

The SDK renews one at half its life, and reads from it who it is (`whoami`). Revoking the key ends its tokens.
"""

from dataclasses import dataclass

import jwt

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import UnauthenticatedError

PREFIX = "eyJ"
"""Of every JWT: its header is JSON, an object, in base64 (RFC 7519)."""
LIFE_S = 3600
ISSUER = "passport-skyrl-tinker"
"""The SDK takes a JWT given as an API key for its server's own by the start of this."""
ORGANIZATION = "local"
_USER = "tml:user:"
_ALGORITHM = "HS256"
_CLAIMS = ["iss", "sub", "iat", "exp", "key"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. `until`: when the token ends (UTC seconds), None for a key.

    A server without keys calls everybody the same, and `owner` is None.
    """

    owner: OwnerId | None
    name: str
    until: int | None = None


def user_urn(name: str) -> str:
    """How the SDK names a user."""
    return _USER + name


class InvalidTokenError(UnauthenticatedError):
    """Another token would do: the SDK gets itself one, and asks again."""


def issue(caller: Caller, secret: bytes, now: float) -> str:
    """A token for LIFE_S seconds; one that is got for a token ends when that does."""
    claims = {
        "iss": ISSUER,
        "sub": user_urn(caller.name),
        "org_id": ORGANIZATION,
        "email": caller.name if "@" in caller.name else "",  # "": the SDK's sign for none
        "key": caller.owner,
        "iat": int(now),
        "exp": min(int(now) + LIFE_S, caller.until or int(now) + LIFE_S),
    }
    return jwt.encode(claims, secret, _ALGORITHM)


def read(token: str, secret: bytes) -> Caller:
    """Whoever it was issued for; its key may be revoked since. InvalidTokenError: not ours, or expired."""
    try:
        claims = jwt.decode(token, secret, [_ALGORITHM], issuer=ISSUER, options={"require": _CLAIMS})
    except jwt.InvalidTokenError as error:
        raise InvalidTokenError(f"X-API-Key: found a JWT that is not valid here: {error}") from error
    return Caller(OwnerId(claims["key"]), claims["sub"].removeprefix(_USER), claims["exp"])
