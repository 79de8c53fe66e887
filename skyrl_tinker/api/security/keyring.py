"""The keys that open this server, as one process knows them: checking a request asks no database."""

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
"""What is created or revoked elsewhere, by the command line or another process, counts within this."""
_SECRET = "jwt"
_MOST_TOKENS = 10_000
_EXPECTED = "expected a live API key of this server, as `skyrl-tinker keys create` makes it"
_log = logging.getLogger(__name__)


class KeyRing:
    """`start` before the first request, then `run` as a task."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret = b""
        self._counts = (0, 0)
        self._by_digest: dict[bytes, Caller] = {}
        self._live: set[OwnerId | None] = set()
        self._read: dict[str, Caller] = {}  # tokens, verified: that costs more than all else here

    @property
    def locked(self) -> bool:
        """There is, or was, a key: revoking the last one does not open the server to all."""
        return self._counts[0] > 0

    async def start(self) -> None:
        self._secret = await self._store.write(lambda conn: server_state.get_or_create_secret(conn, _SECRET))
        await self.refresh()

    async def run(self) -> None:
        """Ends by cancellation."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except OperationalError as error:  # a busy or briefly unreadable database costs one round
                _log.warning("API keys could not be read, trying again: %s", error)

    async def refresh(self) -> None:
        with self._store.read() as conn:
            counts = api_keys.count_keys(conn)
            if counts == self._counts:
                return
            live = api_keys.live_by_digest(conn)
        self._by_digest = {digest: Caller(row.id, row.name) for digest, row in live.items()}
        self._live = {row.id for row in live.values()}
        self._read.clear()
        self._counts = counts

    def caller(self, credential: str | None) -> Caller:
        """Who it is that shows this. UnauthenticatedError; without keys, everybody is welcome."""
        if not self.locked:
            return Caller(None, api_keys.LOCAL_OWNER)
        if not credential:
            raise UnauthenticatedError(f"X-API-Key: found none, {_EXPECTED}")
        if credential.startswith(tokens.PREFIX):
            return self._token(credential)
        caller = self._by_digest.get(api_keys.digest(credential))
        if caller is None:
            raise UnauthenticatedError(f"X-API-Key: found one that is unknown or revoked, {_EXPECTED}")
        return caller

    def token(self, caller: Caller) -> str:
        return tokens.issue(caller, self._secret, time.time())

    def _token(self, token: str) -> Caller:
        caller = self._read.get(token)
        if caller is None or caller.until is None or caller.until <= time.time():
            caller = self._verified(token)
        return caller

    def _verified(self, token: str) -> Caller:
        self._read.pop(token, None)
        caller = tokens.read(token, self._secret)
        if caller.owner not in self._live:
            raise InvalidTokenError(
                "X-API-Key: found a JWT whose API key is revoked, or of before there were keys"
            )
        if len(self._read) >= _MOST_TOKENS:
            self._read.clear()
        self._read[token] = caller
        return caller
