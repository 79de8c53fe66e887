"""JSON over pooled connections, one pool per process and event loop."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import orjson

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.sample_channel import CLOSE_S, LARGEST, SampleChannels
from skyrl_tinker.inference.constants import REPLICA, SESSION
from skyrl_tinker.inference.packed import OTHERWISE, unpack

CONNECT_TIMEOUT_S = 10.0
RETRY_DELAYS_S = (0.05, 0.5)
"""Seconds before the second and third try of a call that may be repeated."""
KEPT_S = 15.0
"""Seconds for which an unused connection is kept."""
KEPT_ONCE_S = 2.0
"""The same for calls that must not be repeated: servers close unused ones after 5 s or more."""


class HttpStatusError(Exception):
    """An error status of the server. Not raised beyond this package."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class HttpAnswer(NamedTuple):
    """Answer below status 400, of `size` bytes; `content`: None when it is neither JSON nor packed."""

    content: Any
    headers: Mapping[str, str]
    size: int = 0


class JsonHttp:
    """HTTP client for JSON. Picklable: a copy makes its own connections."""

    def __init__(self, token: str = "") -> None:
        """`token`: sent with every request; empty: none."""
        self._token = token
        # By server, for calls that must not be repeated; "": for all others.
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels = SampleChannels()

    def __reduce__(self) -> tuple[type["JsonHttp"], tuple[str]]:
        return JsonHttp, (self._token,)

    async def request(
        self,
        method: str,
        url: str,
        *,
        json: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        channel: str = "",
    ) -> HttpAnswer:
        """Return the answer. `channel`: id of a sample, which goes over the server's channel if it has one.

        A repeatable call is tried three times if the connection fails. Raises SamplerError if it still fails,
        HttpStatusError for any status from 400.
        """
        delays = RETRY_DELAYS_S if repeatable else ()
        body = None if json is None else orjson.dumps(json)
        sent = {"Content-Type": "application/json", **(headers or {})}
        for delay in (*delays, None):
            try:
                if channel and (answer := await self._over_channel(url, channel, sent, body or b"")):
                    return answer
                async with self._connections(url, pooled=repeatable) as session:
                    return await _send(session, method, url, data=body, params=params, headers=sent)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                if delay is None:
                    raise SamplerError(f"{method} {url} failed: {_cause(error)}") from error
                await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")

    async def _over_channel(
        self, url: str, attempt: str, headers: Mapping[str, str], body: bytes
    ) -> HttpAnswer | None:
        if len(body) > LARGEST:
            return None
        session_key = headers.get(SESSION, "")
        status, content = await self._channels.ask(self._pool(), url, attempt, session_key, body)
        if status == OTHERWISE:
            return None
        if status >= 400:
            raise HttpStatusError(status, _message(content))
        server = urlsplit(url).netloc.rpartition("@")[2]
        return HttpAnswer(unpack(content), {REPLICA: server}, len(content))

    async def text(self, url: str) -> str:
        """GET a text, in one try. SamplerError if the connection fails, HttpStatusError from status 400."""
        try:
            async with self._pool().get(url) as response:
                content = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise SamplerError(f"GET {url} failed: {_cause(error)}") from error
        if response.status >= 400:
            raise HttpStatusError(response.status, _message(content))
        return content.decode(errors="replace")

    @asynccontextmanager
    async def stream(
        self, url: str, *, json: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST and yield the pieces of the answer as they arrive. Not retried.

        Raises SamplerError if the connection fails, HttpStatusError on entering for any status from 400.
        """
        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            async with self._pool().post(url, data=orjson.dumps(json), headers=sent) as response:
                if response.status >= 400:
                    raise HttpStatusError(response.status, _message(await response.read()))
                yield response.content.iter_any()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise SamplerError(f"POST {url} failed: {_cause(error)}") from error

    @asynccontextmanager
    async def _connections(self, url: str, *, pooled: bool) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield the pool, or connections to one server for calls that must not be repeated, one at a time.

        After a failure the latter are new: the server closes its own, just when the next call may take it.
        """
        if pooled:
            yield self._pool()
            return
        server = urlsplit(url).netloc
        session = self._pool(server, KEPT_ONCE_S)
        try:
            yield session
        except BaseException:
            self._sessions.pop(server, None)
            await session.close()
            raise

    def _pool(self, server: str = "", kept_s: float = KEPT_S) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._sessions = loop, {}
        if server not in self._sessions or self._sessions[server].closed:
            self._sessions[server] = _new_session(self._token, kept_s)
        return self._sessions[server]

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            with suppress(TimeoutError):  # a server that reads nothing more of a channel
                async with asyncio.timeout(CLOSE_S):
                    await session.close()


def bearer(token: str) -> dict[str, str]:
    """Return the authorization header; none for an empty token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _cause(error: Exception) -> str:
    """Return what broke, without the address that aiohttp adds: the URL before it says that."""
    name, number = type(error).__name__, getattr(error, "errno", None)
    return f"{name}: {os.strerror(number)}" if number is not None and number > 0 else name


def _new_session(token: str, kept_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers=bearer(token),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=kept_s),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


async def _send(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> HttpAnswer:
    async with session.request(method, url, **options) as response:
        content = await response.read()
        if response.status >= 400:
            raise HttpStatusError(response.status, _message(content))
        return HttpAnswer(_decode(content), response.headers, len(content))


def _decode(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None  # plain text such as "Success: LoRA adapter added"


def _message(content: bytes) -> str:
    """Read the text in {"error": {"message"}}, {"error": text} or {"detail"}."""
    payload = _decode(content)
    if not isinstance(payload, dict):
        return content.decode(errors="replace")[:2000]
    error = payload.get("error", payload.get("detail", payload))
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
