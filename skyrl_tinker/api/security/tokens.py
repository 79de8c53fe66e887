"""JWTs that the SDK exchanges its API key for, and sends in its place until they expire.

The SDK renews one at half its lifetime, and reads its user from it (`whoami`). A JWT ends with the secret
that it was issued for: when its key is revoked or expires, or rotation ends the secret.
"""

import hashlib
from dataclasses import dataclass

import jwt
from jwt.types import Options

from skyrl_tinker.domain.ids import ALL_OWNERS, OwnerId, Reach
from skyrl_tinker.errors import UnauthenticatedError
from skyrl_tinker.protocol.validation.key_limits import UNLIMITED, KeyLimits

PREFIX = "eyJ"
"""Beginning of every JWT: its header is a JSON object in base64 (RFC 7519)."""
LIFE_S = 3600
ISSUER = "passport-skyrl-tinker"
"""Issuer, by whose beginning the SDK recognizes a JWT given as an API key."""
ORGANIZATION = "local"
_USER = "tml:user:"
_ALGORITHM = "HS256"
_OPTIONS: Options = {
    "require": ["iss", "sub", "iat", "exp", "key", "secret_id"],
    "verify_iat": False,  # times are compared with the caller's clock
    "verify_exp": False,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request. `until`: end of its key or token (UTC seconds), None: never.

    `secret_id` names the secret of the key that it has. On a server without keys all callers have the same
    name, and `owner` is None.
    """

    owner: OwnerId | None
    name: str
    until: float | None = None
    secret_id: str = ""
    admin: bool = False
    limits: KeyLimits = UNLIMITED

    @property
    def reach(self) -> Reach:
        return ALL_OWNERS if self.admin else self.owner


@dataclass(frozen=True, slots=True)
class Claims:
    """Contents of a valid token."""

    owner: OwnerId | None
    secret_id: str
    until: float


def user_urn(name: str) -> str:
    """Return the SDK's identifier of a user."""
    return _USER + name


def secret_id(digest: bytes) -> str:
    """Return a name for a secret, from which neither it nor its digest can be found."""
    return hashlib.sha256(digest).hexdigest()[:16]


class InvalidTokenError(UnauthenticatedError):
    """The JWT is invalid: the SDK gets a new one and repeats the request."""


def issue(caller: Caller, secret: bytes, now: float) -> str:
    """Return a token for LIFE_S seconds; it expires no later than the key or token that it is issued for."""
    ends = [now + LIFE_S, *([] if caller.until is None else [caller.until])]
    claims = {
        "iss": ISSUER,
        "sub": user_urn(caller.name),
        "org_id": ORGANIZATION,
        "email": caller.name if "@" in caller.name else "",  # the SDK reads "" as none
        "key": caller.owner,
        "secret_id": caller.secret_id,
        "iat": int(now),
        "exp": int(min(ends)),
    }
    return jwt.encode(claims, secret, _ALGORITHM)


def read(token: str, secret: bytes, now: float) -> Claims:
    """Return the claims of a token, whose key may have ended since. InvalidTokenError: invalid or expired."""
    try:
        claims = jwt.decode(token, secret, [_ALGORITHM], issuer=ISSUER, options=_OPTIONS)
    except jwt.InvalidTokenError as error:
        raise InvalidTokenError(f"X-API-Key: found a JWT that is not valid here: {error}") from error
    if claims["exp"] <= now:
        raise InvalidTokenError("X-API-Key: found a JWT that has expired")
    return Claims(claims["key"], claims["secret_id"], claims["exp"])
