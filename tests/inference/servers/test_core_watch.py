"""A vLLM whose engine core spins still answers /health; calls through the core tell it from a busy one."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from skyrl_tinker.inference.client.http_connection import JsonHttp
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers import health_checks
from skyrl_tinker.inference.servers.health_checks import CoreWatch, Loss, health
from skyrl_tinker.inference.servers.ports import LOOPBACK, reserve_port
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from tests.inference.support.samplers import ask, prompt_of, sample, spec_of, write_model
from tests.support.sampler_clients import vllm_client
from tests.support.waiting import end, until

pytestmark = [pytest.mark.servers, pytest.mark.long]

STEP_S = 4.0
QUIET_S = 3 * STEP_S
EXTENSION = """
class Spin:
    def spin(self):
        while True:
            pass
"""


def launch(directory: Path, spec: SamplerSpec, port: int) -> subprocess.Popen[bytes]:
    """Start a server whose workers have one more method, which /collective_rpc calls."""
    (directory / "spinning.py").write_text(EXTENSION)
    path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    with (directory / "vllm.log").open("wb") as log:
        return subprocess.Popen(
            [*VllmProcess().command(spec, port, LOOPBACK), "--worker-extension-cls", "spinning.Spin"],
            env=VllmProcess().environment(spec, 0, "lo") | {"PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    spec = spec_of(write_model(tmp_path / "model", tied=True), tmp_path)
    guard = reserve_port()
    port = guard.getsockname()[1]
    process = launch(tmp_path, spec, port)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as http, asyncio.timeout(spec.startup_s):
        while await health(http, url, 5.0) != 200:
            assert process.poll() is None, (tmp_path / "vllm.log").read_text()
            await asyncio.sleep(0.2)
    yield url
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    guard.close()


def watch(url: str) -> asyncio.Task[Loss]:
    return asyncio.create_task(
        CoreWatch(url, VllmProcess().dialect.core_path, JsonHttp(), STEP_S, lambda: False).wait_stuck(0)
    )


async def sample_on(client: RemoteInferenceClient) -> None:
    """As many and as long samples as it can have at once, again and again."""
    while True:
        requests = [ask(prompt_of(10, seed), max_tokens=240, num_samples=4) for seed in range(64)]
        await asyncio.gather(*(sample(client, "base", request) for request in requests))


async def test_a_core_that_spins_is_noticed_and_an_idle_or_busy_one_is_left_alone(server: str) -> None:
    client = vllm_client(server, (server,))
    watching = watch(server)
    assert not (await asyncio.wait((watching,), timeout=QUIET_S))[0], "idle"
    load = asyncio.create_task(sample_on(client))
    assert not (await asyncio.wait((watching, load), timeout=QUIET_S))[0], "busy"

    async with aiohttp.ClientSession() as http:
        spinning = asyncio.create_task(http.post(f"{server}/collective_rpc", json={"method": "spin"}))
        loss = await asyncio.wait_for(watching, 60)
        assert "its engine core does not answer" in loss.reason
        assert loss.silent
        assert await health(http, server, 5.0) == 200
        for task in (spinning, load):
            await end(task)
    await client.close()


async def test_a_core_with_longer_work_is_excused(server: str) -> None:
    watching = asyncio.create_task(
        CoreWatch(server, VllmProcess().dialect.core_path, JsonHttp(), STEP_S, lambda: True).wait_stuck(0)
    )
    async with aiohttp.ClientSession() as http:
        spinning = asyncio.create_task(http.post(f"{server}/collective_rpc", json={"method": "spin"}))
        assert not (await asyncio.wait((watching,), timeout=QUIET_S))[0]
        for task in (spinning, watching):
            await end(task)


async def test_the_core_is_asked_over_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_checks, "CORE_POLL_S", 0.001)
    connections: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        connections.append(request.transport)
        return web.json_response({"is_sleeping": False})

    app = web.Application()
    app.router.add_get("/is_sleeping", answer)
    async with TestServer(app) as asked:
        http = JsonHttp()
        watching = asyncio.create_task(
            CoreWatch(
                str(asked.make_url("")).rstrip("/"), "/is_sleeping", http, STEP_S, lambda: False
            ).wait_stuck(0)
        )
        await until(lambda: len(connections) > 2)
        await end(watching)
        await http.close()
    assert len(set(connections)) == 1
