"""Calls to a server that refuses them while it is paused, as vLLM 0.33 does."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client import data_plane
from tests.support.sampler_clients import vllm_client

PAUSED = {"message": "Generation is paused. Please retry after it resumes.", "code": 503}  # vLLM's words
FULL = {"message": "The engine is currently busy and cannot accept new requests.", "code": 503}


async def serve(refusals: list[dict[str, object]]) -> TestServer:
    async def answer(request: web.Request) -> web.Response:
        if refusals:
            return web.json_response({"error": refusals.pop()}, status=503)
        return web.Response(text=json.dumps({"done": True}), content_type="application/json")

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    server = TestServer(application)
    await server.start_server()
    return server


async def test_calls_wait_for_a_paused_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "PAUSED_S", 0.01)
    refusals = [PAUSED] * 5
    server = await serve(refusals)
    url = str(server.make_url("")).rstrip("/")
    client = vllm_client(url, (url,))
    assert await client.data.openai("/v1/completions", {}) == {"done": True}
    refusals.extend([PAUSED] * 5)
    async with client.data.stream("/v1/completions", {}) as chunks:
        assert json.loads(b"".join([chunk async for chunk in chunks])) == {"done": True}
    refusals.append(FULL)
    with pytest.raises(SamplerError, match="503: The engine is currently busy"):
        await client.data.openai("/v1/completions", {})
    await client.close()
    await server.close()
