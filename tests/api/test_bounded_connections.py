"""What a connection may send before it is anybody's, and how many there may be."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from skyrl_tinker.api import bounded_connections
from skyrl_tinker.api.bounded_connections import HEAD_BYTES, ConnectionCaps, Connections, source
from skyrl_tinker.api.middleware import arriving_body
from tests.support.loop_time import skip
from tests.support.waiting import until

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\n"
WHOLE = HEAD + b"Content-Length: 5\r\n\r\nhello"
LONG = b"X: " + b"a" * 10 * HEAD_BYTES  # more than is read at once

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Stream]]
"""Opens a connection, from another address of this host if one is given."""


async def length(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


@asynccontextmanager
async def served(
    app: ASGIApp = length, total: int = 100, per_address: int = 100, host: str = "127.0.0.1"
) -> AsyncIterator[Connect]:
    """Serve the app; yields what opens a connection to it."""
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=3600)
    connection, state = Connections(ConnectionCaps(total, per_address)), ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: connection(config=config, server_state=state, app_state={}), host, 0
    )
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncExitStack() as closing:

        async def connect(address: str = "127.0.0.1") -> Stream:
            reader, writer = await asyncio.open_connection(host, port, local_addr=(address, 0))
            closing.callback(writer.close)
            return reader, writer

        yield connect


async def answer(stream: Stream, *parts: bytes) -> bytes:
    """Send these parts; what came back by the end of the connection or of a whole answer."""
    reader, writer = stream
    for part in parts:
        writer.write(part)
        await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(size)


async def test_requests_follow_each_other_on_a_connection() -> None:
    async with served() as connect:
        stream = await connect()
        for _ in range(3):
            assert (await answer(stream, WHOLE)).endswith(b"5 bytes")
        body = b"x" * 1_000_000
        sized = HEAD + b"Content-Length: 1000000\r\n\r\n"
        assert (await answer(stream, sized, body)).endswith(b"1000000 bytes")
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        assert (await answer(stream, chunked, b"f4240\r\n" + body + b"\r\n0\r\n\r\n")).endswith(
            b"1000000 bytes"
        )


class Seen:
    """App that notes how its requests begin: with their whole body, or before it."""

    def __init__(self) -> None:
        self.begun: list[bool] = []
        self.received: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(arriving_body.WHOLE in scope.get("extensions", ()))
        self.received.append((await receive())["type"])
        await PlainTextResponse("seen")(scope, receive, send)


async def test_a_request_whose_small_body_comes_apart_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connections, "SMALL_BODY_S", 600.0)
    app = Seen()
    async with served(app) as connect:
        stream, other = await connect(), await connect()
        for _ in range(2):
            stream[1].write(HEAD + b"Content-Length: 5\r\n\r\n")
            await answer(other, WHOLE)  # the head has been read then
            assert (await answer(stream, b"hel", b"lo")).endswith(b"seen")
        skip(1200)
        await answer(other, WHOLE)
    assert (app.begun, app.received) == ([True] * 5, ["http.request"] * 5)


@pytest.mark.parametrize("field", [b"Content-Length: 65537", b"Transfer-Encoding: chunked", b"X: y"])
async def test_other_requests_begin_with_their_heads(field: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connections, "SMALL_BODY_S", 600.0)
    app = Seen()
    async with served(app) as connect:
        stream = await connect()
        stream[1].write(HEAD + field + b"\r\n\r\n")
        await until(lambda: app.begun)
    await until(lambda: app.received)


async def test_a_request_whose_body_does_not_come_begins_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Seen()
    async with served(app) as connect:
        stream, other = await connect(), await connect()
        for _ in range(2):
            stream[1].write(HEAD + b"Content-Length: 5\r\n\r\n")
            await until(lambda: len(app.begun) > len(app.received))
            assert (await answer(stream, b"hello")).endswith(b"seen")
        monkeypatch.setattr(bounded_connections, "SMALL_BODY_S", 600.0)
        stream[1].write(HEAD + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert (await stream[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        assert (await answer(stream, b"hello")).endswith(b"seen")
        stream[1].write(HEAD + b"Content-Length: 5\r\n\r\n")
        await answer(other, WHOLE)
        assert app.begun == [False] * 3 + [True]
        stream[1].close()
        await until(lambda: app.received[-1] == "http.disconnect")


@pytest.mark.parametrize(
    "sent",
    [
        [HEAD, LONG],
        [HEAD, *[b"X: " + b"a" * 1000 + b"\r\n"] * (10 * HEAD_BYTES // 1000)],
        [b"POST /" + b"a" * 10 * HEAD_BYTES],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", LONG],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"a" * 10 * HEAD_BYTES],
    ],
    ids=["one header", "many headers", "path", "trailers", "chunk extension"],
)
async def test_no_more_than_the_bytes_of_a_head_come_outside_of_a_body(sent: list[bytes]) -> None:
    async with served() as connect:
        stream = await connect()
        assert (await answer(stream, *sent)).startswith(b"HTTP/1.1 431")
        assert await stream[0].read() == b""


@pytest.mark.parametrize("sent", [b"", HEAD], ids=["nothing", "half"])
async def test_a_head_has_a_time(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connections, "HEAD_S", 0.2)
    async with served() as connect:
        stream = await connect()
        assert b"not complete after" in await answer(stream, sent)
        assert await stream[0].read() == b""


async def test_the_second_head_of_a_connection_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connections, "HEAD_S", 600.0)
    async with served() as connect:
        stream = await connect()
        await answer(stream, WHOLE)
        skip(1200)  # between requests it is idle, for which uvicorn has another limit
        assert (await answer(stream, WHOLE)).endswith(b"5 bytes")
        monkeypatch.setattr(bounded_connections, "HEAD_S", 0.1)
        assert (await answer(stream, HEAD)).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("caps", "named"),
    [({"total": 3}, b"connections.total"), ({"per_address": 3}, b"connections.per_address")],
)
async def test_connections_over_the_caps_are_told_and_closed(caps: dict[str, int], named: bytes) -> None:
    async with served(**caps) as connect:
        streams = [await connect() for _ in range(3)]
        over = await connect()
        refused = await answer(over)
        assert refused.startswith(b"HTTP/1.1 503")
        assert named in refused
        assert await over[0].read() == b""
        for stream in streams:
            assert (await answer(stream, WHOLE)).endswith(b"5 bytes")
        streams[0][1].close()
        await until(lambda: is_served(connect))


async def connect_all(connect: Connect, address: str) -> list[Stream]:
    """Open connections from this address until one is refused; those that are served."""
    streams: list[Stream] = []
    while True:
        stream = await connect(address)
        if not (await answer(stream, WHOLE)).endswith(b"5 bytes"):
            return streams
        streams.append(stream)


async def test_an_address_leaves_places_for_others() -> None:
    async with served(total=12, per_address=6) as connect:
        taken = [len(await connect_all(connect, f"127.0.0.{each}")) for each in (1, 2, 3, 4)]
        assert taken == [6, 3, 2, 1]


async def test_two_addresses_that_want_all_leave_a_third() -> None:
    async with served(total=12, per_address=6) as connect:
        wanted = [await connect(f"127.0.0.{1 + each % 2}") for each in range(20)]
        served_there = [(await answer(stream, WHOLE)).endswith(b"5 bytes") for stream in wanted]
        assert served_there == [True] * 8 + [False] * 12
        assert len(await connect_all(connect, "127.0.0.3")) == 2


async def test_an_address_may_be_allowed_all_connections() -> None:
    """Such as a proxy's."""
    async with served(total=4, per_address=100) as connect:
        assert len(await connect_all(connect, "127.0.0.1")) == 4


async def test_refused_connections_take_no_place_of_others() -> None:
    async with served(total=6, per_address=3) as connect:
        streams = await connect_all(connect, "127.0.0.1")
        assert len(streams) == 3
        refused = [await connect("127.0.0.1") for _ in range(12)]
        for stream in refused:
            assert (await answer(stream)).startswith(b"HTTP/1.1 503")
        assert (await answer(await connect("127.0.0.2"), WHOLE)).endswith(b"5 bytes")


async def test_connections_of_ipv6_have_the_same_caps() -> None:
    async with served(total=4, per_address=2, host="::1") as connect:
        assert len(await connect_all(connect, "::1")) == 2


async def test_heads_together_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones and whole ones are served while long ones that nobody completes are refused."""
    monkeypatch.setattr(bounded_connections, "ALL_HEADS_BYTES", 4 * 30_000)
    long = HEAD + b"X: " + b"a" * 30_000
    async with served() as connect:
        streams = [await connect() for _ in range(6)]
        for _, writer in streams:
            writer.write(long)
        answers = [asyncio.create_task(reader.readline()) for reader, _ in streams]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert await is_served(connect)  # all that was sent before has been read
        refused = [each.result() for each in answers if each.done()]
        assert 1 <= len(refused) <= 3
        assert all(line.startswith(b"HTTP/1.1 503") for line in refused)
        for (_, writer), read in zip(streams, answers, strict=True):
            read.cancel()
            writer.close()
        await until(lambda: is_served(connect, long + b"\r\nContent-Length: 5\r\n\r\nhello"))


async def test_the_rest_of_a_body_that_is_answered_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who sends a byte now and then would keep the connection for ever."""
    monkeypatch.setattr(bounded_connections, "REST_S", 600.0)
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    async with served(refuse) as connect:
        (reader, writer), other = await connect(), await connect()
        assert (await answer((reader, writer), head)).startswith(b"HTTP/1.1 401")
        for _ in range(4):
            skip(140)
            writer.write(b"1\r\nx\r\n")
            assert (await answer(other, head + b"0\r\n\r\n")).startswith(b"HTTP/1.1 401")
        assert not reader.at_eof()
        skip(140)
        await until(reader.at_eof)
        assert (await answer(other, head)).startswith(b"HTTP/1.1 401")
        other[1].write(b"0\r\n\r\n")
        for _ in range(2):
            assert (await answer(other, head + b"0\r\n\r\n")).startswith(b"HTTP/1.1 401")
            skip(1200)


async def test_an_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connections, "UNREAD_S", 0.3)
    ended = asyncio.Event()

    async def answer_until_closed(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    async with served(answer_until_closed) as connect:
        _, writer = await connect()
        writer.write(WHOLE)
        await asyncio.wait_for(ended.wait(), 60)


async def is_served(connect: Connect, request: bytes = WHOLE) -> bool:
    """Ask on a new connection."""
    stream = await connect()
    found = await answer(stream, request)
    stream[1].close()
    return found.endswith(b"5 bytes")


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without having read the body."""
    await PlainTextResponse("no", 401)(scope, receive, send)


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("", ""),
    ],
)
def test_connections_are_counted_by_what_one_host_has(address: str, counted: str) -> None:
    assert source(address) == counted
