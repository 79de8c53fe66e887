"""API keys of this server, cached in each process so that checking a request reads no database."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.api.security import tokens
from skyrl_tinker.api.security.tokens import Caller, InvalidTokenError
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import UnauthenticatedError
from skyrl_tinker.protocol.validation.key_limits import UNLIMITED, KeyLimits
from skyrl_tinker.store import api_keys, audit_log, owners
from skyrl_tinker.store.api_keys import End, Secret
from skyrl_tinker.store.cluster.signing_secrets import SigningSecrets
from skyrl_tinker.store.database.abstract_database import after_commit
from skyrl_tinker.store.store import Store

REFRESH_S = 0.5
"""Delay within which a change of a key by another process takes effect here."""
NOTE_EVERY_S = 60.0
"""Least time between two notes of last uses and refusals in the database."""
_MOST_TOKENS = 10_000
_EXPECTED = "expected a live API key of this server, made by `skyrl-tinker keys create`"
_UNKNOWN = "unknown or revoked"
_NOBODYS = "unknown keys or invalid JWTs"
_ENDED: Mapping[End, str] = {"expired": "expired at", "replaced": "was rotated away, and ended at"}


MOST_ADDRESSES = 32
OTHERS = "other addresses"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refused credential: of `key` if that is known, then `why` says how it ended."""

    address: str
    why: str
    key: OwnerId | None = None


class Refusals:
    """Counts of refused credentials: at most MOST_ADDRESSES entries, the rest under OTHERS."""

    def __init__(self) -> None:
        self._counts: Counter[Refusal] = Counter()

    def note(self, refusal: Refusal, count: int = 1) -> None:
        if refusal not in self._counts and len(self._counts) >= MOST_ADDRESSES:
            refusal = Refusal(OTHERS, "any")
        self._counts[refusal] += count

    def put_back(self, counts: Counter[Refusal]) -> None:
        """Count the taken refusals again that could not be recorded."""
        for refusal, count in counts.items():
            self.note(refusal, count)

    def take(self) -> Counter[Refusal]:
        """Return the counts and begin anew."""
        taken, self._counts = self._counts, Counter()
        return taken


def record(conn: Connection, counts: Counter[Refusal]) -> None:
    """Write one event per entry: `key_ended_use` for a key that has ended, else `login_fail`."""
    for refusal, count in counts.items():
        event = "login_fail" if refusal.key is None else "key_ended_use"
        audit_log.record_key(conn, event, refusal.key, address=refusal.address, why=refusal.why, count=count)
        told = "refused %d credentials from %s: %s", count, refusal.address, refusal.why
        after_commit(conn, partial(_log.warning, *told))


class KeyRing:
    """Cache of secrets and verified JWTs: `refresh` before the first request, then `run` as a task."""

    def __init__(
        self,
        store: Store,
        signing: SigningSecrets,
        limits: KeyLimits = UNLIMITED,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`limits`: of keys that have none of their own. `clock`: UTC seconds; default: the database's."""
        self._store = store
        self._signing = signing
        self._limits = limits
        self._nobody = Caller(None, owners.LOCAL_OWNER, limits=limits.filled(several=False))
        self._clock = clock or store.now
        self._refreshing = asyncio.Lock()
        self._changes = -1  # of the keys that are here
        self._secrets: dict[str, Secret] = {}  # by secret_id
        self._callers: dict[str, Caller] = {}  # the same
        self._verified: dict[str, Caller] = {}  # by token: verification is the costliest part of a check
        self._used: dict[OwnerId, float] = {}
        self._refusals = Refusals()
        self._noted_at = float("-inf")

    @property
    def limits(self) -> KeyLimits:
        """Limits of keys that have none of their own; those of several live keys are finite."""
        now = self._clock()
        live = {secret.key.id for secret in self._secrets.values() if secret.key.is_live(now)}
        return self._limits.filled(several=len(live) > 1)

    @property
    def locked(self) -> bool:
        """True once a key has existed: revoking the last one does not open the server."""
        return bool(self._secrets)

    async def run(self) -> None:
        """Refresh, and note uses and refusals, until cancelled."""
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                try:
                    await self.refresh()
                    await self._note_sometimes()
                except OperationalError as error:  # a busy or briefly unreadable database costs one round
                    _log.warning("API keys could not be read, trying again: %s", error)
        finally:
            await self._note()

    async def refresh(self) -> None:
        """Read keys and signing secrets again, if they changed."""
        async with self._refreshing:  # of two at once the later has the newer keys
            if self._signing.refresh():
                self._changes = -1
            if (changed := await self._store.read(self._changed)) is None:
                return
            self._changes, found = changed
            self._secrets = {tokens.secret_id(digest): secret for digest, secret in found.items()}
            limits = self.limits
            self._callers = {name: _caller(name, secret, limits) for name, secret in self._secrets.items()}
            self._verified.clear()

    def _changed(self, conn: Connection) -> tuple[int, Mapping[bytes, Secret]] | None:
        """Return the number of changes and the secrets by digest, None if there is no new change."""
        changes = api_keys.count_changes(conn)
        return None if changes == self._changes else (changes, api_keys.secrets_by_digest(conn))

    def caller(self, credential: str | None, address: str = "") -> Caller:
        """Return the holder of a key or JWT. UnauthenticatedError; a server without keys admits any caller.

        `address`: of the client, under which a refusal is noted.
        """
        if not self.locked:
            return self._nobody
        if not credential:
            raise UnauthenticatedError(f"X-API-Key: found none, {_EXPECTED}")
        now = self._clock()
        find = self._token_caller if credential.startswith(tokens.PREFIX) else self._key_caller
        caller = find(credential, address, now)
        if caller.owner is not None:
            self._used[caller.owner] = now
        return caller

    def next_expiry(self) -> float:
        """Return when the next live key expires, UTC seconds; infinity if none does."""
        now = self._clock()
        ends = (secret.until for secret in self._secrets.values() if secret.end == "expired")
        return min((end for end in ends if end is not None and end > now), default=math.inf)

    def issue_token(self, caller: Caller) -> str:
        return tokens.issue(caller, self._signing.current.jwt, self._clock())

    def _key_caller(self, key: str, address: str, now: float) -> Caller:
        secret_id = tokens.secret_id(api_keys.digest(key))
        if secret_id not in self._secrets:
            self._refusals.note(Refusal(address, _NOBODYS))
            raise UnauthenticatedError(f"X-API-Key: found one that is {_UNKNOWN}, {_EXPECTED}")
        if end := self._ended(secret_id, address, now):
            raise UnauthenticatedError(f"X-API-Key: found one that {end}, {_EXPECTED}")
        return self._callers[secret_id]

    def _token_caller(self, token: str, address: str, now: float) -> Caller:
        caller = self._verified.get(token)
        if caller is None or caller.until is None or caller.until <= now:
            caller = self._verify(token, address, now)
        return caller

    def _verify(self, token: str, address: str, now: float) -> Caller:
        self._verified.pop(token, None)
        try:
            claims = tokens.read(token, self._signing.current.jwt, now)
        except InvalidTokenError:
            self._refusals.note(Refusal(address, _NOBODYS))
            raise
        caller = self._callers.get(claims.secret_id)
        if caller is None or caller.owner != claims.owner:
            self._refusals.note(Refusal(address, _NOBODYS))
            raise InvalidTokenError("X-API-Key: found a JWT that was issued before keys existed")
        if end := self._ended(claims.secret_id, address, now):
            raise InvalidTokenError(f"X-API-Key: found a JWT whose API key {end}")
        if len(self._verified) >= _MOST_TOKENS:
            self._verified.clear()
        ends = [claims.until, *([] if caller.until is None else [caller.until])]
        self._verified[token] = replace(caller, until=min(ends))
        return self._verified[token]

    def _ended(self, secret_id: str, address: str, now: float) -> str | None:
        """Return how a secret ended, None while it is valid."""
        secret = self._secrets[secret_id]
        if secret.until is None or secret.end is None or now < secret.until:
            return None
        self._refusals.note(Refusal(address, f"a key that was {secret.end}", secret.key.id))
        when = datetime.fromtimestamp(secret.until, UTC).isoformat(timespec="seconds")
        return f"is {_UNKNOWN}" if secret.end == "revoked" else f"{_ENDED[secret.end]} {when}"

    async def _note_sometimes(self) -> None:
        if time.monotonic() - self._noted_at >= NOTE_EVERY_S:
            await self._note()

    async def _note(self) -> None:
        """Write down who used their keys and who was refused since the last note."""
        used, self._used = self._used, {}
        refused = self._refusals.take()

        def write(conn: Connection) -> None:
            api_keys.note_use(conn, used)
            record(conn, refused)

        if used or refused:
            self._noted_at = time.monotonic()
            try:
                await self._store.write(write)
            except OperationalError:
                self._used = used | self._used
                self._refusals.put_back(refused)
                raise


def _caller(secret_id: str, secret: Secret, limits: KeyLimits) -> Caller:
    key = secret.key
    own = limits.overridden(key.limits or {})
    return Caller(key.id, key.name, secret.until, secret_id, key.admin, own)
