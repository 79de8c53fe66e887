"""The OpenAI routes, with the test in the engine's place: a server on its private socket."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web

from tests.api.support.engine_socket import engine
from tests.api.support.world import BASE, World

COMPLETION = {"model": BASE, "prompt": "a"}


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """Outside /api/v1."""
    transport = httpx.ASGITransport(world.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as made:
        yield made


async def test_models_need_no_engine(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/oai/api/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [BASE]


async def test_without_an_engine_the_reason_is_told_and_when_to_try_again(
    world: World, http: httpx.AsyncClient
) -> None:
    await world.set_engine("starting", "waiting for trainer")
    answer = await http.post("/oai/api/v1/completions", json=COMPLETION)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert "starting: waiting for trainer" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "server_error"


async def test_what_is_wrong_is_said_without_asking_the_engine(http: httpx.AsyncClient) -> None:
    answer = await http.post("/oai/api/v1/completions", json={**COMPLETION, "tools": []})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "tools is not supported",
        "type": "invalid_request_error",
        "param": "tools",
        "code": None,
    }
    answer = await http.post("/oai/api/v1/completions", json={**COMPLETION, "prompt": ["a"] * 9, "n": 128})
    assert "9 prompts x n 128, expected at most 1024 together" in answer.json()["error"]["message"]
    answer = await http.post("/oai/api/v1/chat/completions", content=b"{")
    assert "not valid JSON" in answer.json()["error"]["message"]


async def test_status_body_and_type_go_through(world: World, http: httpx.AsyncClient) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"got": await request.json()}, status=404)

    async with engine(world, web.post("/oai/api/v1/completions", handler)):
        answer = await http.post("/oai/api/v1/completions", json=COMPLETION)
    assert answer.status_code == 404
    assert answer.json() == {"got": COMPLETION}


async def test_a_stream_that_breaks_off_ends_with_an_error(world: World, http: httpx.AsyncClient) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    async with engine(world, web.post("/oai/api/v1/completions", handler)):
        answer = await http.post("/oai/api/v1/completions", json={**COMPLETION, "stream": True})
    assert answer.status_code == 200
    assert "the engine stopped" in answer.text.splitlines()[-2]


async def test_an_answer_that_nobody_waits_for_is_given_up(world: World) -> None:
    """Drive the app directly, since httpx's ASGI transport reports no disconnect."""
    begun, left = asyncio.Event(), asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    body = b'{"model": "m", "prompt": "a"}'
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/oai/api/v1/completions",
        "raw_path": b"/oai/api/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"api"), (b"content-length", str(len(body)).encode())],
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(_: object) -> None: ...

    async with engine(world, web.post("/oai/api/v1/completions", handler)):
        await world.app(scope, receive, send)
        await asyncio.wait_for(left.wait(), 60)
