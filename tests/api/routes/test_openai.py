"""The OpenAI routes, with the test in the engine's place: a server on its private socket."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai
import pytest
from aiohttp import web
from sqlalchemy.exc import OperationalError

from skyrl_tinker.api.middleware import arriving_body
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from tests.api.support.engine_socket import engine
from tests.api.support.world import BASE, FACTS, World, running

COMPLETION = {"model": BASE, "prompt": "a"}
USER = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """Outside /api/v1."""
    transport = httpx.ASGITransport(world.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as made:
        yield made


async def test_models_need_no_engine(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/oai/api/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [BASE]


@pytest.fixture
async def oai(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    url = "http://api/oai/api/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="any", http_client=http, max_retries=0)


async def test_a_model_is_retrieved_by_each_name_that_can_be_used(
    world: World, oai: openai.AsyncOpenAI
) -> None:
    path = await world.checkpoint(await world.model(), CheckpointKind.SAMPLER_WEIGHTS, "one")
    for name in (BASE, "/models/tiny", path):
        assert (await oai.models.retrieve(name)).id == name
    assert (await oai.models.retrieve(path)).created > 0


@pytest.mark.parametrize("name", ["no/such", "tinker://no:train:0/sampler_weights/one"])
async def test_another_model_is_not_found(oai: openai.AsyncOpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not found: no ") as refused:
        await oai.models.retrieve(name)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


async def test_weights_for_training_are_no_model(world: World, oai: openai.AsyncOpenAI) -> None:
    path = await world.checkpoint(await world.model(), CheckpointKind.WEIGHTS, "one")
    with pytest.raises(openai.BadRequestError, match="no weights for sampling"):
        await oai.models.retrieve(path)


async def test_every_refusal_has_the_form_of_openai(world: World, oai: openai.AsyncOpenAI) -> None:
    """Also one by the layers around the route, of which clients read the message only in that form."""

    async def refused(
        kind: type[openai.APIStatusError], message: str, **options: Any
    ) -> openai.APIStatusError:
        with pytest.raises(kind, match=message) as raised:
            await oai.completions.create(model=BASE, prompt="a", **options)
        assert isinstance(raised.value.body, dict)
        assert raised.value.body.keys() == {"message", "type", "param", "code"}
        return raised.value

    large = await refused(
        openai.APIStatusError,
        "request body: found .* expected at most",
        extra_body={"user": "a" * (17 << 20)},
    )
    assert large.status_code == 413
    await refused(openai.PermissionDeniedError, "Host: found", extra_headers={"Host": "evil.example"})
    await refused(openai.BadRequestError, "Content-Encoding", extra_headers={"Content-Encoding": "br"})
    with pytest.raises(openai.NotFoundError, match="no route POST /oai/api/v1/embeddings") as unknown:
        await oai.embeddings.create(model=BASE, input="a")
    assert unknown.value.code == "unknown_url"
    with pytest.raises(openai.APIStatusError, match="found DELETE, expected GET") as method:
        await oai.models.delete(BASE)
    assert method.value.status_code == 405
    assert method.value.response.headers["Allow"] == "GET"

    away = OperationalError("SELECT", {}, Exception("the database is locked"))
    world.patch.setattr(world.services.backlogs, "full", AsyncMock(side_effect=away))
    busy = await refused(openai.InternalServerError, "the database failed, send this again")
    assert (busy.status_code, busy.response.headers["Retry-After"]) == (503, "2")

    world.patch.setattr(world.services.backlogs, "full", AsyncMock(side_effect=ZeroDivisionError))
    transport = httpx.ASGITransport(world.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport) as quiet:
        oai = oai.with_options(http_client=quiet)
        assert (await refused(openai.InternalServerError, "internal error: ZeroDivision")).status_code == 500


async def test_a_body_that_does_not_come_is_refused_in_that_form_too(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving_body, "GRACE_S", 0.1)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = await http.post("/oai/api/v1/completions", content=slow())
    assert answer.status_code == 408
    assert "found 1 bytes and then too little" in answer.json()["error"]["message"]


async def test_an_engine_that_fails_beyond_its_own_words_is_a_server_error(
    world: World, oai: openai.AsyncOpenAI
) -> None:
    async def handler(_: web.Request) -> web.Response:
        raise ZeroDivisionError

    async with engine(world, web.post("/oai/api/v1/completions", handler)):
        with pytest.raises(openai.InternalServerError, match="the engine failed with status 500"):
            await oai.completions.create(model=BASE, prompt="a")


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


@pytest.mark.parametrize(
    ("route", "fields", "param", "message"),
    [
        ("completions", {"prompt": "a", "seed": 1}, "seed", "seed is not supported by .* engine, Plain"),
        ("completions", {"prompt": "a", "temperature": 0.001}, "temperature", "expected 0 .* at least 0.01"),
        (
            "chat/completions",
            {"messages": USER, "tools": TOOLS},
            "tools",
            "tools: tool_parser is not .*, Plain",
        ),
        ("chat/completions", {"messages": USER, "stream": True, "logprobs": True}, "logprobs", ", Plain$"),
        (
            "chat/completions",
            {"messages": USER, "separate_reasoning": True},
            "separate_reasoning",
            "separate_reasoning: reasoning_parser is not supported by .*, Plain",
        ),
    ],
)
async def test_what_the_samplers_lack_is_refused_without_asking_the_engine(
    settings: Settings, route: str, fields: dict[str, Any], param: str, message: str
) -> None:
    lacking = SamplerAbilities(
        "Plain", 0.01, seed=False, tool_parser=False, reasoning_parser=False, streamed_chat_logprobs=False
    )
    async with running(settings, replace(FACTS, sampler=lacking)) as world:
        answer = await world.http.post(f"http://api/oai/api/v1/{route}", json={"model": BASE, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"])


async def test_status_body_and_type_go_through(world: World, http: httpx.AsyncClient) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"got": await request.json()}, status=404)

    async with engine(world, web.post("/oai/api/v1/completions", handler)):
        answer = await http.post("/oai/api/v1/completions", json=COMPLETION)
    assert answer.status_code == 404
    assert answer.json() == {"got": COMPLETION}


async def test_long_integers_are_served_as_bounds_and_refused_elsewhere(
    world: World, http: httpx.AsyncClient
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    def asked(**fields: Any) -> dict[str, Any]:
        schema = {"type": "integer", "exclusiveMaximum": 2**64, "maximum": 2**64 + 1}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return {"model": BASE, "messages": USER, "response_format": form, **fields}

    async with engine(world, web.post("/oai/api/v1/chat/completions", handler)):
        served = await http.post("/oai/api/v1/chat/completions", json=asked(metadata={"a": 2**64}))
        refused = await http.post("/oai/api/v1/chat/completions", json=asked(seed=2**64))
    assert (served.status_code, served.json()) == (200, asked(metadata={"a": 2**64}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")


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


async def test_an_answer_that_a_shutdown_cuts_off_is_to_be_asked_for_again(
    world: World, http: httpx.AsyncClient
) -> None:
    begun = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with engine(world, web.post("/oai/api/v1/completions", handler)):
        asked = asyncio.create_task(http.post("/oai/api/v1/completions", json=COMPLETION))
        await begun.wait()
        world.services.waiter.stop()
        asked.cancel()  # as uvicorn does, in a process that ends
        answer = await asked
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert answer.json()["error"]["message"] == "this server process is shutting down; try again"


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

    body = json.dumps({"model": BASE, "prompt": "a"}).encode()
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
