"""Connections of calls that must not be repeated."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from skyrl_tinker.inference.client.http_connection import HttpStatusError, JsonHttp

ANSWER = b"HTTP/1.1 %d x\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"


class Server:
    """Server that fails calls to /fail, and then closes the connection when the next call has taken it."""

    def __init__(self) -> None:
        self.connections = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        failed = False
        while (request := await reader.readline()) and not failed:
            while (await reader.readline()).strip():
                pass
            failed = b"/fail" in request
            writer.write(ANSWER % (500 if failed else 200))
        writer.close()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def url(server: Server) -> AsyncIterator[str]:
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    yield f"http://{host}:{port}"
    listener.close()


async def test_calls_that_must_not_be_repeated_share_a_connection_until_one_fails(
    server: Server, url: str
) -> None:
    http = JsonHttp()
    for _ in range(3):
        await http.request("GET", f"{url}/update", repeatable=False)
    assert server.connections == 1
    with pytest.raises(HttpStatusError):
        await http.request("GET", f"{url}/fail", repeatable=False)
    await http.request("GET", f"{url}/update", repeatable=False)
    assert server.connections == 2
    await http.close()
