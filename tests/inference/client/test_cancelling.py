"""A sample that is given up stops in vLLM, also behind a router."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.router import Router, RouterSpec
from tests.inference.support.samplers import CONTEXT, Served, ask, prompt_of, sample
from tests.support.sampler_clients import vllm_client
from tests.support.waiting import end, until

MANY = 512
STARTED_S, WHOLE_S = 0.2, 2.0
"""CPU time of the servers after which they are surely sampling, and which all that is asked takes by far."""


@pytest.fixture(params=["alone", "behind a router"])
async def client(
    request: pytest.FixtureRequest, servers: dict[str, Served], tmp_path: Path
) -> AsyncIterator[RemoteInferenceClient]:
    if request.param == "alone":
        urls = servers["untied"].group.urls
        alone = vllm_client(urls[0], urls)
        yield alone
        await alone.close()
        return
    urls = servers["tied"].group.urls
    router = Router(RouterSpec(str(tmp_path / "logs"), "of the router"))
    await router.start(urls)
    routed = vllm_client(router.url, urls, "of the router")
    yield routed
    await routed.close()
    await router.shutdown()


def processes_of(client: RemoteInferenceClient) -> set[psutil.Process]:
    """The servers' and those below them, one of which samples."""
    ports = {url.rpartition(":")[2] for url in client.server_urls}
    servers = [each for each in psutil.Process().children(recursive=True) if _port(each) in ports]
    assert {_port(each) for each in servers} == ports
    return {process for each in servers for process in (each, *each.children(recursive=True))}


def _port(process: psutil.Process) -> str | None:
    try:
        line = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    return line[line.index("--port") + 1] if "--port" in line else None


async def test_a_cancelled_call_stops_in_vllm(client: RemoteInferenceClient) -> None:
    processes = processes_of(client)

    def cpu_s() -> float:
        return sum(times.user + times.system for times in (each.cpu_times() for each in processes))

    request = ask(prompt_of(5), num_samples=MANY, max_tokens=CONTEXT - 5, seed=1)
    began = cpu_s()
    asking = asyncio.create_task(sample(client, "base", request))
    await until(lambda: cpu_s() >= began + STARTED_S)
    assert not asking.done()
    given_up = cpu_s()
    await end(asking)
    await client.control.pause("wait")  # until all that they have is sampled to its end, or aborted
    await client.control.resume()
    assert cpu_s() - given_up < WHOLE_S
