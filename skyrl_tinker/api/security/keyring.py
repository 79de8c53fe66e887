"""API keys of this server, cached in each process so that checking a request reads no database."""

import asyncio
import logging
import time

from sqlalchemy.exc import OperationalError

from skyrl_tinker.api.security import tokens
from skyrl_tinker.api.security.tokens import Caller, InvalidTokenError
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import UnauthenticatedError
from skyrl_tinker.store import api_keys, server_state
from skyrl_tinker.store.store import Store

REFRESH_S = 0.5
"""Delay within which a key that another process creates or revokes takes effect here."""
_SECRET = "jwt"
_MOST_TOKENS = 10_000
_EXPECTED = "expected a live API key of this server, made by `skyrl-tinker keys create`"
_log = logging.getLogger(__name__)


class KeyRing:
    """Cache of live API keys and verified JWTs: `start` before the first request, then `run` as a task."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret = b""
        self._counts = (0, 0)
        self._by_digest: dict[bytes, Caller] = {}
        self._live: set[OwnerId | None] = set()
        self._verified: dict[str, Caller] = {}  # by token: verification is the costliest part of a check

    @property
    def locked(self) -> bool:
        """True once a key has existed: revoking the last one does not open the server."""
        return self._counts[0] > 0

    async def start(self) -> None:
        self._secret = await self._store.write(lambda conn: server_state.get_or_create_secret(conn, _SECRET))
        self.refresh()

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                self.refresh()
            except OperationalError as error:  # a busy or briefly unreadable database costs one round
                _log.warning("API keys could not be read, trying again: %s", error)

    def refresh(self) -> None:
        with self._store.read() as conn:
            counts = api_keys.count_keys(conn)
            if counts == self._counts:
                return
            live = api_keys.live_by_digest(conn)
        self._by_digest = {digest: Caller(row.id, row.name) for digest, row in live.items()}
        self._live = {row.id for row in live.values()}
        self._verified.clear()
        self._counts = counts

    def caller(self, credential: str | None) -> Caller:
        """Return the owner of a key or JWT. UnauthenticatedError; a server without keys admits any caller."""
        if not self.locked:
            return Caller(None, api_keys.LOCAL_OWNER)
        if not credential:
            raise UnauthenticatedError(f"X-API-Key: found none, {_EXPECTED}")
        if credential.startswith(tokens.PREFIX):
            return self._token_caller(credential)
        caller = self._by_digest.get(api_keys.digest(credential))
        if caller is None:
            raise UnauthenticatedError(f"X-API-Key: found one that is unknown or revoked, {_EXPECTED}")
        return caller

    def issue_token(self, caller: Caller) -> str:
        return tokens.issue(caller, self._secret, time.time())

    def _token_caller(self, token: str) -> Caller:
        caller = self._verified.get(token)
        if caller is None or caller.until is None or caller.until <= time.time():
            caller = self._verify(token)
        return caller

    def _verify(self, token: str) -> Caller:
        self._verified.pop(token, None)
        caller = tokens.read(token, self._secret)
        if caller.owner not in self._live:
            raise InvalidTokenError(
                "X-API-Key: found a JWT whose API key is revoked, or that was issued before keys existed"
            )
        if len(self._verified) >= _MOST_TOKENS:
            self._verified.clear()
        self._verified[token] = caller
        return caller
