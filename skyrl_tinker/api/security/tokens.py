"""JWTs that the SDK exchanges its API key for, and sends in its place until they expire.

The SDK renews one at half its lifetime, and reads its user from it (`whoami`). Revoking a key revokes its
JWTs, too.
"""

from dataclasses import dataclass

import jwt

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import UnauthenticatedError

PREFIX = "eyJ"
"""Beginning of every JWT: its header is a JSON object in base64 (RFC 7519)."""
LIFE_S = 3600
ISSUER = "passport-skyrl-tinker"
"""Issuer, by whose beginning the SDK recognizes a JWT given as an API key."""
ORGANIZATION = "local"
_USER = "tml:user:"
_ALGORITHM = "HS256"
_CLAIMS = ["iss", "sub", "iat", "exp", "key"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request. `until`: expiry of the token (UTC seconds), None for a key.

    On a server without keys all callers have the same name, and `owner` is None.
    """

    owner: OwnerId | None
    name: str
    until: int | None = None


def user_urn(name: str) -> str:
    """Return the SDK's identifier of a user."""
    return _USER + name


class InvalidTokenError(UnauthenticatedError):
    """The JWT is invalid: the SDK gets a new one and repeats the request."""


def issue(caller: Caller, secret: bytes, now: float) -> str:
    """Return a token for LIFE_S seconds; one issued for another token expires no later than that one."""
    claims = {
        "iss": ISSUER,
        "sub": user_urn(caller.name),
        "org_id": ORGANIZATION,
        "email": caller.name if "@" in caller.name else "",  # the SDK reads "" as none
        "key": caller.owner,
        "iat": int(now),
        "exp": min(int(now) + LIFE_S, caller.until or int(now) + LIFE_S),
    }
    return jwt.encode(claims, secret, _ALGORITHM)


def read(token: str, secret: bytes) -> Caller:
    """Return the caller of a token, whose key may be revoked since. InvalidTokenError: invalid or expired."""
    try:
        claims = jwt.decode(token, secret, [_ALGORITHM], issuer=ISSUER, options={"require": _CLAIMS})
    except jwt.InvalidTokenError as error:
        raise InvalidTokenError(f"X-API-Key: found a JWT that is not valid here: {error}") from error
    return Caller(OwnerId(claims["key"]), claims["sub"].removeprefix(_USER), claims["exp"])
