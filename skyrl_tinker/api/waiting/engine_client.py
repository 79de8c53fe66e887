"""The engine as the API sees it: its HTTP server, and its state in the store."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp
import orjson
from aiohttp.connector import AddrInfoType
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from starlette.requests import ClientDisconnect

from skyrl_tinker.errors import SamplerError, UnavailableError
from skyrl_tinker.protocol.schemas.openai import OWNER_HEADER, error_body
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster.signing_secrets import ENGINE_HEADER, SigningSecrets
from skyrl_tinker.store.store import Store

EVENTS, JSON = "text/event-stream", "application/json"
ASK_S = 5.0
RETRY_AFTER_S = 5
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,  # ms
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineState:
    """`base_models`: (state, detail) by name, also "stopped"; empty before the engine has reported.

    `since`: of these states, in UTC seconds of the engine's host.
    """

    state: str  # starting | ready | failed | restarting
    detail: str
    base_models: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self.state == "ready"


def engine_state(conn: Connection) -> EngineState:
    """Return the engine's state; `starting` until it has reported one."""
    value = server_state.get(conn, "engine")
    if value is None:
        return EngineState("starting", "the engine has not reported yet")
    bases = {name: (state, detail) for name, (state, detail) in value.get("base_models", {}).items()}
    return EngineState(value["state"], value["detail"], bases, value.get("base_models_since", {}))


class EngineUnavailableError(Exception):
    """The engine does not answer: it is starting, or dead."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Way to the engine: connections, the beginning of its URLs, headers."""

    pool: aiohttp.ClientSession
    url: str
    headers: dict[str, str]


class EngineClient:
    """HTTP client of the engine, for one event loop; to be closed.

    It takes the engine's socket if there is one, else its address in the store, as on another host.
    """

    def __init__(self, path: Path, store: Store, secrets: SigningSecrets) -> None:
        self._socket = path
        self._store = store
        self._secrets = secrets
        self._pools: dict[str, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()

    async def ask(self, path: str, body: bytes | None = None) -> bytes:
        """Return the body of the answer to a GET, or with a body to a POST.

        EngineUnavailableError, also when there is none within ASK_S.
        """
        try:
            way = await self._way()
            method, url, headers = "GET" if body is None else "POST", way.url + path, way.headers
            async with (
                asyncio.timeout(ASK_S),
                way.pool.request(method, url, data=body, headers=headers, raise_for_status=True) as answer,
            ):
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailableError from error

    async def refusal(self) -> UnavailableError:
        """Return the error for a request that met an EngineUnavailableError."""
        engine = await self._store.read(engine_state)
        return UnavailableError(f"the engine is {engine.state}: {engine.detail}; try again", RETRY_AFTER_S)

    async def relay(self, request: Request) -> Response:
        """Return the engine's answer to this request, streamed if it is a stream.

        Raises EngineUnavailableError if none begins, ClientDisconnect when the client leaves first,
        SamplerError for one that says nothing.
        """
        try:
            return await _while_connected(request, self._relay(request))
        except aiohttp.ClientError as error:
            raise EngineUnavailableError from error

    async def _relay(self, request: Request) -> Response:
        headers = {"Content-Type": JSON}
        if (owner := request.scope.get("owner")) is not None:
            headers[OWNER_HEADER] = str(owner)
        way, body = await self._way(), await request.body()
        answer = await way.pool.post(way.url + request.url.path, data=body, headers=headers | way.headers)
        if answer.status == HTTPStatus.UNAUTHORIZED:  # the secrets of one of the two are new
            answer.close()
            raise EngineUnavailableError
        if answer.content_type == EVENTS:
            return StreamingResponse(_pieces(answer), answer.status, media_type=EVENTS)
        async with answer:
            if answer.content_type != JSON:  # the engine failed in a way that it does not know
                raise SamplerError(f"the engine failed with status {answer.status}; see the server's log")
            return Response(await answer.read(), answer.status, media_type=answer.content_type)

    async def _way(self) -> _Way:
        if self._socket.exists():
            return _Way(self._pool("unix"), "http://engine", {})
        try:
            address = await self._store.read(lambda conn: server_state.get(conn, server_state.ENGINE_ADDRESS))
        except OperationalError as error:
            raise EngineUnavailableError from error
        if address is None:
            raise EngineUnavailableError
        token = {ENGINE_HEADER: self._secrets.current.engine_token}
        return _Way(self._pool("network"), f"http://{address}", token)

    def _pool(self, name: str) -> aiohttp.ClientSession:
        if name not in self._pools:
            unix = name == "unix"
            self._pools[name] = aiohttp.ClientSession(
                connector=(
                    aiohttp.UnixConnector(str(self._socket), limit=0)
                    if unix
                    else aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket)
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=ASK_S),
            )
        return self._pools[name]


def _watched_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket whose connection breaks 20 s after the engine's host is gone, also in a stream."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the answer piece by piece; ending early closes the connection, which the engine notices."""
    async with answer:
        try:
            async for piece in answer.content.iter_any():
                yield piece
        except aiohttp.ClientError:  # too late for a status
            error = SamplerError("the engine stopped in the middle of this answer")
            yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


async def _while_connected(request: Request, answer: Awaitable[T]) -> T:
    """Return the answer; cancel it and raise ClientDisconnect when the client closes its connection first."""
    await request.body()  # the only message after it is a disconnect
    answering, disconnect = asyncio.ensure_future(answer), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answering, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return await answering
    finally:
        for task in (answering, disconnect):
            task.cancel()
