"""vllm-router before real replicas: sessions stick, workers come and go, and it comes back where it was."""

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from skyrl_tinker.domain.samples import SampleOutput
from skyrl_tinker.engine.sampler.affinity import Affinity
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.router import Router, RouterSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from tests.inference.support import samplers
from tests.inference.support.samplers import Served, ask, prompt_of, spec_of
from tests.support.sampler_clients import vllm_client

SESSIONS = 24
TOKEN = "of this router"


@pytest.fixture
async def router(servers: dict[str, Served], tmp_path: Path) -> AsyncIterator[Router]:
    """A router before the two replicas of the tied model."""
    started = Router(RouterSpec(str(tmp_path / "logs"), TOKEN))
    await started.start(servers["tied"].group.urls)
    yield started
    await started.shutdown()


@pytest.fixture
async def client(servers: dict[str, Served], router: Router) -> AsyncIterator[RemoteInferenceClient]:
    routed = vllm_client(router.url, servers["tied"].group.urls, TOKEN)
    await routed.control.reset_prefix_cache()
    yield routed
    await routed.close()


async def sample(client: RemoteInferenceClient, session: int, seed: int) -> SampleOutput:
    request = ask(prompt_of(200, seed=seed), max_tokens=2)
    return await samplers.sample(client, "base", request, session_key=f"s{session}")


async def cached(client: RemoteInferenceClient, session: int, seed: int) -> bool:
    """Return whether the replica that got the request had seen the prompt before."""
    return bool((await sample(client, session, seed)).cached_tokens)


async def test_a_session_stays_on_its_replica_and_sessions_are_spread(client: RemoteInferenceClient) -> None:
    sessions = range(SESSIONS)
    assert not any([await cached(client, session, seed=1000 + session) for session in sessions])
    assert all([await cached(client, session, seed=1000 + session) for session in sessions])
    first_seen = [not await cached(client, session, seed=999) for session in sessions]
    assert sum(first_seen) == 2  # one prompt for all sessions: new to each of two replicas


async def test_many_prompts_with_one_beginning_reach_both_replicas(client: RemoteInferenceClient) -> None:
    affinity, beginning = Affinity(lambda: 2), prompt_of(200, seed=1)
    with ExitStack() as stack:
        prompts = [array("q", [*beginning, *prompt_of(100, seed=seed)]).tobytes() for seed in range(32)]
        keys = [stack.enter_context(affinity.key(None, prompt, 1)) for prompt in prompts]
    request = ask(prompt_of(200, seed=998), max_tokens=2)
    outputs = [await samplers.sample(client, "base", request, session_key=key) for key in keys]
    assert [output.cached_tokens for output in outputs].count(0) == 2, "new to each of two replicas"


@pytest.mark.long
async def test_workers_are_added_killed_and_removed_at_run_time(
    servers: dict[str, Served], router: Router, client: RemoteInferenceClient, tmp_path: Path
) -> None:
    group = ServerGroup.launch(spec_of(servers["tied"].facts, tmp_path / "third"))
    await group.ready()
    await router.add(group.urls[0])
    await router.add(group.urls[0])  # harmless
    await asyncio.gather(*(sample(client, session, seed=5) for session in range(SESSIONS)))

    await group.end(0)
    results = await asyncio.gather(
        *(sample(client, s, seed=5) for s in range(SESSIONS)), return_exceptions=True
    )
    lost = [result for result in results if isinstance(result, BaseException)]
    assert 0 < len(lost) < SESSIONS  # the sessions of the dead one, and no others
    assert all(isinstance(result, SamplerError) for result in lost)

    await router.remove(group.urls[0])
    await router.remove(group.urls[0])  # harmless
    await asyncio.gather(*(sample(client, session, seed=5) for session in range(SESSIONS)))
    await group.shutdown()


async def test_a_router_that_died_comes_back_at_the_same_address_with_its_workers(
    router: Router, client: RemoteInferenceClient
) -> None:
    url = router.url
    watching = asyncio.create_task(router.wait_died())
    await sample(client, 0, seed=6)
    os.kill(router.pid, signal.SIGKILL)
    assert await asyncio.wait_for(watching, 60) == "the router ended"
    with pytest.raises(SamplerError):
        await sample(client, 0, seed=6)
    await router.start()
    assert router.url == url
    await asyncio.gather(*(sample(client, session, seed=6) for session in range(SESSIONS)))
