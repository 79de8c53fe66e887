"""The engine's own HTTP server, on a private socket: its answers go through to the client as they come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import aiohttp
import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.protocol.schemas.openai import OWNER_HEADER, error_body

EVENTS = "text/event-stream"
GET_S = 5.0
T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class EngineUnavailableError(Exception):
    """The engine does not answer: it is starting, or dead."""


class EngineClient:
    """Use it from one event loop, and close it."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> bytes:
        """The body. EngineAwayError, also when it does not come in GET_S."""
        try:
            async with asyncio.timeout(GET_S), self._pool().get(f"http://engine{path}") as answer:
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailableError from error

    async def relay(self, request: Request) -> Response:
        """The engine's answer to this request; it is asked no longer once the client is gone.

        EngineAwayError before there is an answer, ClientGoneError.
        """
        try:
            return await _unless_gone(request, self._relay(request))
        except aiohttp.ClientError as error:
            raise EngineUnavailableError from error

    async def _relay(self, request: Request) -> Response:
        headers = {"Content-Type": "application/json"}
        if (owner := request.scope.get("owner")) is not None:
            headers[OWNER_HEADER] = str(owner)
        url = f"http://engine{request.url.path}"
        answer = await self._pool().post(url, data=await request.body(), headers=headers)
        if answer.content_type == EVENTS:
            return StreamingResponse(_pieces(answer), answer.status, media_type=EVENTS)
        async with answer:
            return Response(await answer.read(), answer.status, media_type=answer.content_type)

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self._socket), limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Leaving early closes the connection, which the engine notices."""
    async with answer:
        try:
            async for piece in answer.content.iter_any():
                yield piece
        except aiohttp.ClientError:  # too late for a status
            error = SamplerError("the engine ended in the middle of this answer")
            yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


async def _unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """ClientGoneError, and the answer is given up, when the client closes its connection first."""
    await request.body()  # after it, only a disconnect is to come
    asked, gone = asyncio.ensure_future(answer), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise ClientGoneError
        return await asked
    finally:
        for task in (asked, gone):
            task.cancel()
