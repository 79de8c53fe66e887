"""Samples over a server's WebSocket, which loses connections, refuses, or has none."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha1
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.http_websocket import WS_KEY

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference import packed
from skyrl_tinker.inference.client import http_connection, sample_channel
from skyrl_tinker.inference.client.http_connection import HttpStatusError, JsonHttp
from skyrl_tinker.inference.constants import REPLICA, SESSION
from skyrl_tinker.inference.packed import OTHERWISE, PROTOCOL, asked, pack, parts_of, tell, together
from tests.support.waiting import end, until

PATH = "/generate"
Answer = Callable[[web.WebSocketResponse, str, bytes], Awaitable[None]]


async def reply(socket: web.WebSocketResponse, request_id: str, status: int, content: bytes) -> None:
    await socket.send_bytes(together([tell(request_id, status, content)]))


async def echo(socket: web.WebSocketResponse, request_id: str, content: bytes) -> None:
    await reply(socket, request_id, 200, pack({"asked": orjson.loads(content)}))


class Server:
    """Server that gives the messages of its channels to `answer`."""

    def __init__(self) -> None:
        self.answer: Answer = echo
        self.sockets: list[web.WebSocketResponse] = []
        self.messages: list[tuple[str, str, bytes]] = []
        self.sizes: list[int] = []  # of what came at once
        self.by_http = 0
        self.refuses = False
        self.protocols: tuple[str, ...] = (PROTOCOL,)

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        if self.refuses:
            raise web.HTTPServiceUnavailable
        socket = web.WebSocketResponse(protocols=self.protocols, max_msg_size=0)
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            assert message.type is aiohttp.WSMsgType.BINARY
            self.sizes.append(len(message.data))
            for part in parts_of(message.data):
                self.messages.append(asked(part))
                request_id, _, content = self.messages[-1]
                if content:
                    await self.answer(socket, request_id, content)
        return socket

    async def post(self, request: web.Request) -> web.Response:
        self.by_http += 1
        return web.json_response({"posted": await request.json()})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def url(server: Server, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(PATH, server.post)
    if getattr(request, "param", "with channels") == "with channels":
        app.router.add_get(PATH, server.connect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}{PATH}"
    for socket in server.sockets:
        await socket.close()
    await runner.cleanup()


@pytest.fixture
async def http() -> AsyncIterator[JsonHttp]:
    made = JsonHttp("secret")
    yield made
    await made.close()


async def send(http: JsonHttp, url: str, number: int) -> Any:
    return (await http.request("POST", url, json={"number": number}, channel=f"sample-{number}")).content


async def test_samples_share_a_connection_and_each_gets_its_own_answer(
    server: Server, url: str, http: JsonHttp
) -> None:
    held: list[tuple[str, bytes]] = []

    async def last_first(socket: web.WebSocketResponse, request_id: str, content: bytes) -> None:
        held.append((request_id, content))
        if len(held) == 3:
            for each in reversed(held):
                await echo(socket, *each)

    server.answer = last_first
    answers = await asyncio.gather(*(send(http, url, number) for number in range(3)))
    assert answers == [{"asked": {"number": number}} for number in range(3)]
    assert (len(server.sockets), server.by_http) == (1, 0)


async def test_samples_of_one_moment_share_messages_up_to_a_size(
    server: Server, url: str, http: JsonHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(http, url, 0)  # opens the channel
    await asyncio.gather(*(send(http, url, number) for number in range(1, 10)))
    assert (len(server.messages), len(server.sizes)) == (10, 2)
    monkeypatch.setattr(packed, "TOGETHER_BYTES", server.sizes[0] + 1)
    await asyncio.gather(*(send(http, url, number) for number in range(1, 10)))
    assert (len(server.messages), len(server.sizes)) == (19, 7)


async def test_a_server_gets_the_session_and_is_named(server: Server, url: str, http: JsonHttp) -> None:
    answer = await http.request("POST", url, json={}, headers={SESSION: "of a session"}, channel="sample")
    assert server.messages == [("sample", "of a session", b"{}")]
    assert url == f"http://{answer.headers[REPLICA]}{PATH}"
    assert answer.size > 0


async def test_what_was_on_a_lost_connection_is_asked_again(server: Server, url: str, http: JsonHttp) -> None:
    async def close_the_first(socket: web.WebSocketResponse, request_id: str, content: bytes) -> None:
        if len(server.sockets) == 1:
            if len(server.messages) == 2:
                await socket.close()
            return
        await echo(socket, request_id, content)

    server.answer = close_the_first
    answers = await asyncio.gather(send(http, url, 1), send(http, url, 2))
    assert answers == [{"asked": {"number": 1}}, {"asked": {"number": 2}}]
    assert (len(server.sockets), server.by_http) == (2, 0)


async def test_a_server_that_has_gone_is_a_sampler_error(
    server: Server, url: str, http: JsonHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go(socket: web.WebSocketResponse, request_id: str, content: bytes) -> None:
        await socket.close()

    server.answer = go
    monkeypatch.setattr(http_connection, "RETRY_DELAYS_S", (0.0, 0.0))
    with pytest.raises(SamplerError, match="ServerDisconnectedError"):
        await send(http, url, 1)
    assert len(server.sockets) == 3


async def test_a_cancelled_sample_ends_at_the_server_and_no_other_does(
    server: Server, url: str, http: JsonHttp
) -> None:
    async def answer_the_second(socket: web.WebSocketResponse, request_id: str, content: bytes) -> None:
        if request_id == "sample-2":
            await echo(socket, request_id, content)

    server.answer = answer_the_second
    first = asyncio.create_task(send(http, url, 1))
    await until(lambda: len(server.messages) == 1)
    first.cancel()
    await until(lambda: server.messages[1:] == [("sample-1", "", b"")])
    assert await send(http, url, 2) == {"asked": {"number": 2}}
    assert len(server.sockets) == 1


async def test_a_refusal_has_the_servers_words(server: Server, url: str, http: JsonHttp) -> None:
    async def refuse(socket: web.WebSocketResponse, request_id: str, content: bytes) -> None:
        error = orjson.dumps({"error": {"message": "no such adapter"}})
        await reply(socket, request_id, 404, error)

    server.answer = refuse
    with pytest.raises(HttpStatusError, match="no such adapter") as refused:
        await send(http, url, 1)
    assert refused.value.status == 404


@pytest.mark.parametrize("url", ["without channels"], indirect=True)
async def test_a_server_without_channels_gets_requests(server: Server, url: str, http: JsonHttp) -> None:
    for number in range(2):
        assert await send(http, url, number) == {"posted": {"number": number}}
    assert server.by_http == 2


async def test_a_server_of_another_version_gets_requests(server: Server, url: str, http: JsonHttp) -> None:
    server.protocols = ("skyrl-tinker.samples.0",)
    for number in range(2):
        assert await send(http, url, number) == {"posted": {"number": number}}
    assert (len(server.sockets), server.messages) == (1, [])
    await until(lambda: server.sockets[0].closed)


async def test_what_arrays_do_not_answer_is_asked_by_http(server: Server, url: str, http: JsonHttp) -> None:
    async def leave(socket: web.WebSocketResponse, request_id: str, content: bytes) -> None:
        await reply(socket, request_id, OTHERWISE, b"")

    server.answer = leave
    assert await send(http, url, 1) == {"posted": {"number": 1}}


async def test_what_would_close_the_channel_is_asked_by_http(
    server: Server, url: str, http: JsonHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "LARGEST", 20)
    assert await send(http, url, 10**12) == {"posted": {"number": 10**12}}
    assert await send(http, url, 1) == {"asked": {"number": 1}}


def test_another_event_loop_opens_a_channel_of_its_own(server: Server) -> None:
    http, ports = JsonHttp(), [0]

    async def once() -> Any:
        app = web.Application()
        app.router.add_get(PATH, server.connect)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", ports[-1], reuse_address=True).start()
        ports.append(runner.addresses[0][1])
        answer = await send(http, f"http://127.0.0.1:{ports[-1]}{PATH}", 1)
        await http.close()
        await runner.cleanup()
        return answer

    assert [asyncio.run(once()) for _ in range(2)] == [{"asked": {"number": 1}}] * 2
    assert ports[1] == ports[2]


class Stopped:
    """Server that takes a connection, and reads nothing of it until it is told to go on."""

    def __init__(self, *, handshake: bool = True) -> None:
        self.go_on = asyncio.Event()
        self.reading = False
        self.writers: list[asyncio.StreamWriter] = []
        self._handshake = handshake

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        key = ""
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(": ")
            key = value if name.lower() == "sec-websocket-key" else key
        if self._handshake:
            accepted = b64encode(sha1((key + WS_KEY.decode()).encode()).digest()).decode()
            head = "HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            agreed = f"Sec-WebSocket-Protocol: {PROTOCOL}\r\nSec-WebSocket-Accept: {accepted}\r\n\r\n"
            writer.write((head + agreed).encode())
            self.reading = bool(await reader.read(1))
        await self.go_on.wait()
        while await reader.read(1 << 20):
            pass


@pytest.fixture
async def stopped(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Stopped, str]]:
    server = Stopped(handshake=getattr(request, "param", True))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    yield server, f"http://{host}:{port}{PATH}"
    server.go_on.set()
    for writer in server.writers:
        writer.transport.abort()
    listener.close()


async def test_a_sample_that_is_cancelled_before_it_could_be_sent_ends_no_other(
    http: JsonHttp, stopped: tuple[Stopped, str]
) -> None:
    server, url = stopped
    samples = [
        asyncio.create_task(http.request("POST", url, json={"text": "x" * (1 << 20)}, channel=f"{number}"))
        for number in range(20)
    ]
    await until(lambda: server.reading)  # more than a connection holds has been written or waits
    samples[7].cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert [number for number, sample in enumerate(samples) if sample.done()] == [7]
    for sample in samples:
        await end(sample)


async def test_a_server_that_dies_before_it_has_read_everything_is_a_sampler_error(
    http: JsonHttp, stopped: tuple[Stopped, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "RETRY_DELAYS_S", ())
    server, url = stopped
    samples = [
        asyncio.create_task(http.request("POST", url, json={"text": "x" * (1 << 20)}, channel=f"{number}"))
        for number in range(12)
    ]
    await until(lambda: server.reading)
    server.writers[0].transport.abort()
    for sample in samples:
        with pytest.raises(SamplerError, match="ServerDisconnectedError"):
            await sample


@pytest.mark.parametrize("stopped", [False], indirect=True)
async def test_a_handshake_that_is_never_answered_ends(
    http: JsonHttp, stopped: tuple[Stopped, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_channel, "HANDSHAKE_S", 0.1)
    server, url = stopped
    by_http = asyncio.create_task(send(http, url, 1))
    await until(lambda: len(server.writers) == 2)  # the request after the handshake
    await end(by_http)


async def test_a_server_that_had_no_channel_for_a_while_is_asked_again(
    server: Server, url: str, http: JsonHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_channel, "AGAIN_S", 0.0)
    server.refuses = True
    assert await send(http, url, 1) == {"posted": {"number": 1}}
    server.refuses = False
    assert await send(http, url, 2) == {"asked": {"number": 2}}
