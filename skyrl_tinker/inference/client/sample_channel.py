"""One WebSocket to each sampler for all its samples (inference/packed.py): no HTTP request for each."""

import asyncio
import time
from contextlib import suppress

import aiohttp

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.inference.packed import OTHERWISE, PROTOCOL, Outgoing, ask, parts_of, told

LARGEST = 8 * MiB
"""Bytes of the longest request on a channel: at 16 MiB a sampler's web server closes it."""
HEARTBEAT_S = 60.0
"""Seconds of silence until a sign of life is asked of the server, which has half of them to give one."""
HANDSHAKE_S, CLOSE_S = 10.0, 1.0
AGAIN_S = 30.0
"""Seconds for which a server that agrees on no channel, or says nothing, is not asked for one again."""


class SampleChannels:
    """Channels by URL, each opened by its first sample, and again by the next one after it was lost."""

    def __init__(self) -> None:
        self._opened: dict[str, asyncio.Task[_Channel]] = {}
        self._without: dict[str, float] = {}
        """Monotonic times until which servers are taken to have no channels."""

    async def ask(
        self, session: aiohttp.ClientSession, url: str, attempt: str, key: str, content: bytes
    ) -> tuple[int, bytes]:
        """Return status and content of the answer; OTHERWISE if the server has no channels.

        Raises aiohttp.ClientConnectionError.
        """
        if time.monotonic() < self._without.get(url, 0.0):
            return OTHERWISE, b""
        opened = self._opened.get(url)
        if opened is None or _is_over(opened):
            self._opened = {of: each for of, each in self._opened.items() if not _is_over(each)}
            opened = self._opened[url] = asyncio.create_task(_open(session, url))
            opened.add_done_callback(_note_error)
        try:
            channel = await asyncio.shield(opened)  # others wait for it, too
        except (aiohttp.WSServerHandshakeError, aiohttp.WebSocketError, TimeoutError):
            self._without[url] = time.monotonic() + AGAIN_S
            return OTHERWISE, b""
        return await channel.ask(attempt, ask(attempt, key, content))


class _Channel:
    """No sample writes by itself: aiohttp has all that wait for a full connection end with one of them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.lost = False
        self._socket = socket
        self._waiting: dict[str, asyncio.Future[tuple[int, bytes]]] = {}
        self._outgoing = Outgoing()
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    async def ask(self, attempt: str, message: bytes) -> tuple[int, bytes]:
        if self.lost:
            raise aiohttp.ServerDisconnectedError
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = answer
        self._outgoing.put(message)
        try:
            return await answer
        except asyncio.CancelledError:
            self._outgoing.put(attempt.encode())  # the server aborts it
            raise
        finally:
            del self._waiting[attempt]

    async def _write(self) -> None:
        try:
            with suppress(OSError, RuntimeError, aiohttp.ClientError):  # the connection is lost
                while True:
                    await self._socket.send_bytes(await self._outgoing.message())
        finally:
            self._lose()

    async def _read(self) -> None:
        try:
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.BINARY:
                for part in parts_of(message.data):
                    attempt, status, content = told(part)
                    answer = self._waiting.get(attempt)
                    if answer is not None and not answer.done():
                        answer.set_result((status, content))
        finally:
            self._writer.cancel()
            self._lose()
            await _close(self._socket)

    def _lose(self) -> None:
        self.lost = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(aiohttp.ServerDisconnectedError())


async def _open(session: aiohttp.ClientSession, url: str) -> _Channel:
    async with asyncio.timeout(HANDSHAKE_S):
        socket = await session.ws_connect(url, protocols=(PROTOCOL,), heartbeat=HEARTBEAT_S, max_msg_size=0)
    if socket.protocol != PROTOCOL:  # a server of another version
        await _close(socket)
        raise aiohttp.WebSocketError(aiohttp.WSCloseCode.PROTOCOL_ERROR, f"{url} does not speak {PROTOCOL}")
    return _Channel(socket)


async def _close(socket: aiohttp.ClientWebSocketResponse) -> None:
    with suppress(TimeoutError):  # a server that reads nothing more
        async with asyncio.timeout(CLOSE_S):
            await socket.close()


def _note_error(opened: asyncio.Task[_Channel]) -> None:
    """Take the error of a channel for which nobody waits any more: else asyncio logs it."""
    if not opened.cancelled():
        opened.exception()


def _is_over(opened: asyncio.Task[_Channel]) -> bool:
    """Return whether the channel was lost, or not reached, or is of another event loop."""
    if opened.get_loop() is not asyncio.get_running_loop():
        return True
    if not opened.done():
        return False
    return opened.cancelled() or opened.exception() is not None or opened.result().lost
