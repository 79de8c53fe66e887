"""Calls to every replica reach all of them or none, and those that failed are named."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from skyrl_tinker.errors import NotFoundError, SamplerError
from tests.inference.support.samplers import (
    Sampler,
    Served,
    ask,
    prompt_of,
    publish_adapter,
    random_adapter,
    unique,
)
from tests.support.sampler_clients import vllm_client

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
async def both(servers: dict[str, Served]) -> AsyncIterator[Sampler]:
    """Two replicas of one model."""
    served = servers["tied"]
    assert len(served.group.urls) == 2
    client = vllm_client(served.group.urls[0], served.group.urls)
    client.control.patience_s = 2.0
    yield Sampler(client, served.facts)
    await client.close()


async def test_a_pause_reaches_all_and_is_taken_back_when_one_hangs(both: Sampler) -> None:
    client, urls = both.client, both.client.server_urls
    await client.control.pause("keep")
    assert await client.control.is_paused()
    await client.control.replica(urls[1]).resume()
    with pytest.raises(SamplerError, match="replicas differ"):
        await client.control.is_paused()
    await client.control.resume()
    assert not await client.control.is_paused()

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client.control.server_urls = (*urls, hung)
        with pytest.raises(SamplerError, match=f"{hung}/pause: no answer within 2 s"):
            await client.control.pause("keep")
    client.control.server_urls = urls
    assert not await client.control.is_paused()
    assert (await both("base", ask(prompt_of(5)))).sequences


async def test_an_adapter_is_loaded_on_all_or_on_none(both: Sampler, tmp_path: Path) -> None:
    client, urls, name = both.client, both.client.server_urls, unique(tmp_path)
    publish_adapter(random_adapter(both.facts.directory, 8, 1), tmp_path / name, both.facts.directory)
    client.control.server_urls = (*urls, NOBODY)
    with pytest.raises(SamplerError, match=NOBODY):
        await client.control.load_adapter(name, str(tmp_path / name))
    client.control.server_urls = urls
    assert name not in await client.control.adapters()
    with pytest.raises(NotFoundError):
        await both(name, ask(prompt_of(5)))

    await client.control.replica(urls[1]).load_adapter(name, str(tmp_path / name))
    await client.control.load_adapter(name, str(tmp_path / name))  # also where it is already
    client.control.server_urls = (*urls, NOBODY)
    with pytest.raises(SamplerError, match=NOBODY):
        await client.control.load_adapter(name, str(tmp_path / name))
    client.control.server_urls = urls
    for url in urls:  # and what was there stays
        assert name in await client.control.replica(url).adapters()
    await client.control.unload_adapter(name)
    assert name not in await client.control.adapters()


async def test_a_prefix_cache_is_reset_once_nothing_of_it_is_on_its_way_to_the_host() -> None:
    answers: list[bool | str] = [False, "Failed to reset KV cache even when all is preempted", False, True]

    async def reset(request: web.Request) -> web.Response:
        assert dict(request.query) == {"reset_running_requests": "true", "reset_external": "true"}
        answer = answers.pop(0)
        if isinstance(answer, str):
            return web.json_response({"error": {"message": answer}}, status=500)
        return web.json_response({"success": answer})

    app = web.Application()
    app.router.add_post("/reset_prefix_cache", reset)
    async with TestServer(app) as server:
        client = vllm_client(str(server.make_url("")), (str(server.make_url("")).rstrip("/"),))
        await client.control.reset_prefix_cache()
        assert answers == []
        answers += [False] * 100
        client.control.patience_s = 0.1
        with pytest.raises(SamplerError, match=r"could not reset its prefix cache within 0\.1 s"):
            await client.control.reset_prefix_cache()
        answers[:] = ["the engine is dead"]
        with pytest.raises(SamplerError, match="the engine is dead"):
            await client.control.reset_prefix_cache()
        await client.close()


async def test_sleep_reaches_all_or_none(both: Sampler) -> None:
    client, urls = both.client, both.client.server_urls
    await client.control.sleep(1)
    assert await client.control.is_sleeping()
    await client.control.wake_up(["weights"])
    await client.control.wake_up(["kv_cache"])
    assert not await client.control.is_sleeping()
    client.control.server_urls = (*urls, NOBODY)
    with pytest.raises(SamplerError, match=NOBODY):
        await client.control.sleep(1)
    client.control.server_urls = urls
    assert not await client.control.is_sleeping()
    assert (await both("base", ask(prompt_of(5)))).sequences


async def test_every_replica_that_failed_is_named(both: Sampler) -> None:
    client = both.client
    client.control.server_urls = ("http://127.0.0.1:9", client.server_urls[0], "http://127.0.0.1:10")
    with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9/health.*127\.0\.0\.1:10/health"):
        await client.control.health()
    client.control.server_urls = ()
    with pytest.raises(SamplerError, match="no sampler is running"):
        await client.control.health()


async def test_a_weight_message_reaches_every_replica(both: Sampler) -> None:
    client = both.client
    assert await client.control.world_sizes() == (1, 1)
    assert await client.control.world_size() == 2
    with pytest.raises(SamplerError) as refused:  # no update was started
        await client.control.update_weights({"path": "/nowhere"})
    for url in client.server_urls:
        assert f"{url}/update_weights" in str(refused.value)


async def test_a_replica_is_told_once_to_join_a_group_whose_id_serves_once() -> None:
    joins = 0

    async def answer_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal joins
        joins += 1
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(answer_nothing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = vllm_client(url, (url,))
    with pytest.raises(SamplerError, match="init_weight_transfer_engine failed"):
        await client.control.init_weight_transfer_engine({})
    assert joins == 1
    await client.close()
    server.close()


async def test_caches_are_reset_everywhere(both: Sampler) -> None:
    prompt = prompt_of(200, seed=77)
    for _ in range(2):
        output = await both("base", ask(prompt))
    assert output.cached_tokens
    await both.client.control.reset_prefix_cache()
    assert not (await both("base", ask(prompt))).cached_tokens
