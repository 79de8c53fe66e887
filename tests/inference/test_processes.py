"""A server lives no longer than its actor, and its death is seen and mended."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from skyrl_tinker.errors import NotSupportedError, SamplerError
from skyrl_tinker.inference.client import RemoteInferenceClient
from skyrl_tinker.inference.group import ServerGroup
from tests.inference.samplers import Sampler, ask, prompt_of, spec_of, write_model


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False


def family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


async def test_dead_servers_are_noticed_and_replaced(ray_cluster: None, tmp_path: Path) -> None:
    group = ServerGroup.launch(spec_of(facts := write_model(tmp_path / "model", tied=True), tmp_path))
    await group.ready()
    client = RemoteInferenceClient(group.urls[0], group.urls)

    await _actor_is_killed(group)
    first_url = group.urls
    await group.restart_dead()
    assert group.urls != first_url
    client.retarget(group.urls[0], group.urls)
    assert (await Sampler(client, facts)("base", ask(prompt_of(5)))).sequences

    await _engine_process_is_killed(group)
    left = family(group.pids()[0])
    await group.shutdown()
    assert gone(left, within_s=5)
    await client.close()


async def _actor_is_killed(group: ServerGroup) -> None:
    processes = family(group.pids()[0])
    assert len(processes) >= 2  # the API server and its engine process
    watching = asyncio.create_task(group.watch())
    await asyncio.sleep(0.2)
    os.kill(psutil.Process(processes[0]).ppid(), signal.SIGKILL)
    assert await asyncio.to_thread(gone, processes, 5.0)
    with pytest.raises(SamplerError):
        await asyncio.wait_for(watching, 3.0)


async def _engine_process_is_killed(group: ServerGroup) -> None:
    watching = asyncio.create_task(group.watch())
    await asyncio.sleep(0.2)
    os.kill(family(group.pids()[0])[1], signal.SIGKILL)
    with pytest.raises(SamplerError, match="vLLM"):
        await asyncio.wait_for(watching, 3.0)


async def test_a_server_that_cannot_start_says_why(ray_cluster: None, tmp_path: Path) -> None:
    facts = write_model(tmp_path / "model", tied=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    group = ServerGroup.launch(spec_of(facts, tmp_path))
    with pytest.raises(SamplerError, match=r"(?s)vLLM ended while starting; its log ends with:.*config"):
        await group.ready()
    await group.shutdown()


async def test_a_sampler_too_large_for_the_memory_is_refused(ray_cluster: None, tmp_path: Path) -> None:
    huge = replace(write_model(tmp_path / "model", tied=True), num_layers=10_000, num_kv_heads=1_000)
    group = ServerGroup.launch(spec_of(huge, tmp_path))
    with pytest.raises(SamplerError, match=r"the sampler needs .* MiB are free"):
        await group.ready()
    await group.shutdown()


def test_replicas_are_refused_for_now(tmp_path: Path) -> None:
    spec = spec_of(write_model(tmp_path / "model", tied=True), tmp_path)
    with pytest.raises(NotSupportedError, match="replicas must be 1 for now, found 2"):
        ServerGroup.launch(replace(spec, replicas=2))
