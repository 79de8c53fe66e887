"""Streams on OpenAI's routes, at a replica that has accepted them and begun none."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import openai
import psutil

from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.client.sampling_port import Dialect
from skyrl_tinker.inference.constants import TOKEN
from tests.e2e.support.client import random_tokens
from tests.support.processes import client_of
from tests.support.serve import HEAL_S, Serve
from tests.support.waiting import wait_until

STREAMS = 24
PROMPT = random_tokens(12, seed=8)


def assert_taken_over(server: Serve, victim: psutil.Process, dialect: Dialect) -> None:
    """Kill a replica that stands still, with streams of which nothing was sent: others send all of them."""
    router = server.find("router")
    assert router is not None
    with client_of(victim) as http:
        url = http.base_url
    asyncio.run(_pause(str(url), victim.environ()[TOKEN], dialect))
    assert url.port is not None
    port = url.port
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(_end, server.url, index) for index in range(STREAMS)]
        wait_until(lambda: 0 < _open(streams) <= _connections(router, port))
        victim.kill()
        assert {stream.result(HEAL_S) for stream in streams} <= {"stop", "length"}


async def _pause(url: str, token: str, dialect: Dialect) -> None:
    client = RemoteInferenceClient(url, (url,), token, dialect=dialect)
    await client.control.pause("keep", clear_cache=False)
    await client.close()


def _end(url: str, last: int) -> str | None:
    """Read a stream whose prompt ends in this token; return the reason of its end."""
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="any", max_retries=0) as oai:
        prompt = [*PROMPT, last]
        *_, chunk = oai.completions.create(model="tiny", prompt=prompt, max_tokens=24, stream=True)
    return chunk.choices[0].finish_reason


def _open(streams: Sequence[Future[str | None]]) -> int:
    return sum(not stream.done() for stream in streams)


def _connections(process: psutil.Process, port: int) -> int:
    """Count its connections to a port."""
    return sum(bool(each.raddr) and each.raddr.port == port for each in process.net_connections("tcp"))
