"""A server lives no longer than its actor, and its death is seen and mended."""

import asyncio
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from skyrl_tinker.domain.values import Gpu
from skyrl_tinker.domain.weight_files import WEIGHTS_FILE
from skyrl_tinker.errors import SamplerError, last_line
from skyrl_tinker.inference.constants import NICENESS, SLICE_S
from skyrl_tinker.inference.servers.health_checks import Loss
from skyrl_tinker.inference.servers.router import Router, RouterSpec
from skyrl_tinker.inference.servers.sampler_server import with_cause
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.system.processes import slice_s
from tests.inference.support.samplers import CONTEXT, Sampler, ask, prompt_of, spec_of, write_model
from tests.support.processes import is_zombie
from tests.support.sampler_clients import vllm_client
from tests.support.waiting import until

NOWHERE = Gpu("0" * 56, "0")
"""On a node that does not exist."""


async def end_of(pids: list[int]) -> None:
    await until(lambda: all(not psutil.pid_exists(pid) or is_zombie(psutil.Process(pid)) for pid in pids))


def family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


async def loss_of(group: ServerGroup, index: int) -> Loss:
    async with asyncio.timeout(60):
        return await group.wait_lost(index)


@pytest.mark.long
async def test_dead_and_hung_servers_are_noticed_and_replaced(ray_cluster: None, tmp_path: Path) -> None:
    facts = write_model(tmp_path / "model", tied=True)
    group = ServerGroup.launch(replace(spec_of(facts, tmp_path), replicas=2, hang_s=2.0))
    await group.ready()
    urls = group.urls
    _give_way(family(group.pids()[0]))
    await _an_actor_is_killed(group, 0)
    await _an_engine_process_is_killed(group, 1)
    assert not set(await asyncio.gather(group.replace(0), group.replace(1))) & set(urls)
    await _a_server_hangs(group, 0)

    client = vllm_client(group.urls[1], group.urls[1:])
    assert (await Sampler(client, facts)("base", ask(prompt_of(5)))).sequences
    await client.close()
    left = family(group.pids()[1])
    await group.shutdown()
    await end_of(left)


@pytest.mark.long
async def test_a_server_with_a_token_serves_those_who_bear_it_also_behind_the_router(
    ray_cluster: None, tmp_path: Path
) -> None:
    facts = write_model(tmp_path / "model", tied=True)
    group = ServerGroup.launch(replace(spec_of(facts, tmp_path), token="secret"))
    await group.ready()
    router = Router(RouterSpec(str(tmp_path), "secret"))
    await router.start(group.urls)
    request = ask(prompt_of(5))
    for url in (group.urls[0], router.url):
        stranger = vllm_client(url, group.urls)
        with pytest.raises(SamplerError, match="401"):
            await Sampler(stranger, facts)("base", request)
        bearing = pickle.loads(pickle.dumps(vllm_client(url, group.urls, "secret")))
        assert (await Sampler(bearing, facts)("base", request)).sequences
        prompt = {"prompt": "a"}
        assert len(await bearing.data.tokenize(prompt)) == 1
        with pytest.raises(SamplerError, match="401"):
            await stranger.data.tokenize(prompt)
        for route in ("pause", "resume", "weight_version", "adapters", "is_sleeping"):
            with pytest.raises(SamplerError, match="401"):
                await getattr(stranger.control, route)()
            await getattr(bearing.control, route)()
        await stranger.close()
        await bearing.close()
    await router.shutdown()
    await group.shutdown()


def _give_way(processes: list[int]) -> None:
    """Compute in long slices, and, once they have started, no longer as nicely as their imports."""
    actor = psutil.Process(psutil.Process(processes[0]).ppid())
    own = slice_s(actor.pid)
    settable = own > 0 and os.sched_getscheduler(actor.pid) == os.SCHED_OTHER
    expected = (actor.nice(), SLICE_S["cpu"]) if settable else (actor.nice() + NICENESS, own)
    assert {(psutil.Process(pid).nice(), slice_s(pid)) for pid in processes} == {expected}


async def _an_actor_is_killed(group: ServerGroup, index: int) -> None:
    processes = family(group.pids()[index])
    assert len(processes) >= 2  # the API server and its engine process
    os.kill(psutil.Process(processes[0]).ppid(), signal.SIGKILL)
    await end_of(processes)
    loss = await loss_of(group, index)
    assert (loss.index, loss.url) == (index, group.urls[index])
    assert "actor died" in loss.reason


async def _an_engine_process_is_killed(group: ServerGroup, index: int) -> None:
    os.kill(family(group.pids()[index])[1], signal.SIGKILL)
    assert "died" in (await loss_of(group, index)).reason


async def _a_server_hangs(group: ServerGroup, index: int) -> None:
    processes = family(group.pids()[index])
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    loss = await loss_of(group, index)
    assert loss.silent
    assert "does not answer" in loss.reason
    assert await group.end(index)
    await end_of(processes)


@pytest.mark.long
async def test_a_dead_engine_process_fills_no_log(ray_cluster: None, tmp_path: Path) -> None:
    """All its requests fail by the same exception, whose traceback would grow with each that logs it."""
    facts = write_model(tmp_path / "model", tied=True)
    group = ServerGroup.launch(spec_of(facts, tmp_path))
    await group.ready()
    client = vllm_client(group.urls[0], group.urls)
    sampler, long = Sampler(client, facts), ask(prompt_of(5), max_tokens=CONTEXT - 10)
    samples = [asyncio.create_task(sampler("base", long)) for _ in range(64)]
    await asyncio.sleep(0.5)
    os.kill(family(group.pids()[0])[1], signal.SIGKILL)
    failed = [
        each
        for each in await asyncio.gather(*samples, return_exceptions=True)
        if isinstance(each, SamplerError)
    ]
    await client.close()
    await group.shutdown()
    assert len(failed) > 16
    assert (tmp_path / "vllm-0.log").read_text().count("Traceback") < 4


@pytest.mark.long
async def test_a_server_that_cannot_start_says_why(ray_cluster: None, tmp_path: Path) -> None:
    facts = write_model(tmp_path / "model", tied=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    group = ServerGroup.launch(spec_of(facts, tmp_path))
    with pytest.raises(SamplerError, match=r"(?s)vLLM ended while starting; its log ends with:.*config"):
        await group.ready()
    await group.shutdown()


@pytest.mark.parametrize(
    ("log", "last"),
    [
        ("ValueError: early\nINFO going on", "INFO going on"),
        (
            "(EngineCore pid=7) ERROR 11-30 [core.py:1510] torch.OutOfMemoryError: 2 GiB\n(APIServer pid=1) "
            "RuntimeError: Engine core initialization failed. See root cause above.\nnanobind: leaked",
            "torch.OutOfMemoryError: 2 GiB",
        ),
        ("RuntimeError: no memory\nReceived sigquit from a child process.", "RuntimeError: no memory"),
        ("Killed\nReceived sigquit from a child process.", "Received sigquit from a child process."),
    ],
)
def test_the_cause_comes_last_where_a_log_refers_to_it(log: str, last: str) -> None:
    assert last_line(with_cause(log)) == last


@pytest.mark.long
async def test_an_error_of_its_core_is_the_last_that_a_failed_start_tells(
    ray_cluster: None, tmp_path: Path
) -> None:
    """vLLM's last words are only that another process of it has failed."""
    facts = write_model(tmp_path / "model", tied=True)
    os.truncate(tmp_path / "model" / WEIGHTS_FILE, 10_000)
    group = ServerGroup.launch(spec_of(facts, tmp_path))
    with pytest.raises(SamplerError, match=r"(?s)vLLM ended while starting.*See root cause above") as failed:
        await group.ready()
    await group.shutdown()
    assert "SafetensorError: " in last_line(str(failed.value))


@pytest.mark.long
async def test_further_arguments_reach_vllm(ray_cluster: None, tmp_path: Path) -> None:
    arguments = {"max-num-seqs": 3, "enable-prefix-caching": False, "disable-log-stats": False}
    facts = write_model(tmp_path / "model", tied=True)
    group = ServerGroup.launch(replace(spec_of(facts, tmp_path), engine=VllmProcess(arguments)))
    await group.ready()
    sampler = Sampler(vllm_client(group.urls[0], group.urls), facts)
    outputs = [await sampler("base", ask(prompt_of(200))) for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 0]
    await sampler.client.close()
    await group.shutdown()


@pytest.mark.long
async def test_an_argument_that_vllm_does_not_know_is_named(ray_cluster: None, tmp_path: Path) -> None:
    facts = write_model(tmp_path / "model", tied=True)
    group = ServerGroup.launch(replace(spec_of(facts, tmp_path), engine=VllmProcess({"max-nun-seqs": 3})))
    with pytest.raises(SamplerError, match=r"(?s)vLLM ended while starting.*unrecognized.*max-nun-seqs"):
        await group.ready()
    await group.shutdown()


async def test_a_place_that_ray_does_not_find_is_an_error_of_the_replica(
    ray_cluster: None, tmp_path: Path
) -> None:
    spec = replace(spec_of(write_model(tmp_path / "model", tied=True), tmp_path), shared_gpus=(NOWHERE,))
    group = ServerGroup.launch(spec)
    with pytest.raises(SamplerError, match=r"the sampler's actor died \(ActorUnschedulableError\)"):
        await group.ready()
    await group.shutdown()


@pytest.mark.usefixtures("ray_cluster")
def test_samplers_too_large_for_the_memory_are_refused(tmp_path: Path) -> None:
    spec = spec_of(write_model(tmp_path / "model", tied=True), tmp_path)
    huge = replace(spec, model=replace(spec.model, num_layers=10_000, num_kv_heads=1_000))
    with pytest.raises(SamplerError, match=r"the sampler needs .* MiB are free"):
        ServerGroup.launch(huge)
    with pytest.raises(
        SamplerError, match=r"needs \d+ MiB \(10000 times 64 for the KV cache .* fewer replicas"
    ):
        ServerGroup.launch(replace(spec, replicas=10_000))
