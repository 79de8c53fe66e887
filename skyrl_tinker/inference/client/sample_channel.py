"""One WebSocket to each sampler for all its samples (inference/packed.py): no HTTP request for each."""

import asyncio
from contextlib import suppress

import aiohttp

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.inference.packed import OTHERWISE, ask, told

LARGEST = 8 * MiB
"""Bytes of the longest request on a channel: at 16 MiB a sampler's web server closes it."""
HEARTBEAT_S = 60.0
"""Seconds of silence until a sign of life is asked of the server, which has half of them to give one."""


class SampleChannels:
    """Channels by URL, each opened by its first sample, and again by the next one after it was lost."""

    def __init__(self) -> None:
        self._opened: dict[str, asyncio.Task[_Channel | None]] = {}

    async def ask(
        self, session: aiohttp.ClientSession, url: str, attempt: str, key: str, content: bytes
    ) -> tuple[int, bytes]:
        """Return status and content of the answer; OTHERWISE if the server has no channels.

        Raises aiohttp.ClientConnectionError.
        """
        opened = self._opened.get(url)
        if opened is None or _is_over(opened):
            opened = self._opened[url] = asyncio.create_task(_open(session, url))
        channel = await asyncio.shield(opened)  # others wait for it, too
        return await channel.ask(attempt, ask(attempt, key, content)) if channel else (OTHERWISE, b"")


class _Channel:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._waiting: dict[str, asyncio.Future[tuple[int, bytes]]] = {}
        self._reader = asyncio.create_task(self._read())
        self._cancels: set[asyncio.Task[None]] = set()
        self.lost = False

    async def ask(self, attempt: str, message: bytes) -> tuple[int, bytes]:
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = answer
        try:
            await self._socket.send_bytes(message)
            return await answer
        except asyncio.CancelledError:
            cancel = asyncio.create_task(self._cancel(attempt))  # a full connection must not hold us up
            self._cancels.add(cancel)
            cancel.add_done_callback(self._cancels.discard)
            raise
        finally:
            del self._waiting[attempt]

    async def _cancel(self, attempt: str) -> None:
        with suppress(aiohttp.ClientConnectionError):  # the server aborts all that came over it
            await self._socket.send_bytes(attempt.encode())

    async def _read(self) -> None:
        try:
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.BINARY:
                attempt, status, content = told(message.data)
                answer = self._waiting.get(attempt)
                if answer is not None and not answer.done():
                    answer.set_result((status, content))
        finally:
            self.lost = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(aiohttp.ServerDisconnectedError())
            await self._socket.close()


async def _open(session: aiohttp.ClientSession, url: str) -> _Channel | None:
    try:
        return _Channel(await session.ws_connect(url, heartbeat=HEARTBEAT_S, max_msg_size=0))
    except aiohttp.WSServerHandshakeError:  # another server than ours
        return None


def _is_over(opened: "asyncio.Task[_Channel | None]") -> bool:
    """Return whether the channel was lost, or not reached, or is of another event loop."""
    if opened.get_loop() is not asyncio.get_running_loop():
        return True
    if not opened.done():
        return False
    if opened.cancelled() or opened.exception() is not None:
        return True
    channel = opened.result()
    return channel is not None and channel.lost
