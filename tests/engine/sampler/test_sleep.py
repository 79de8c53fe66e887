"""All replicas sleep and wake together; one that cannot is ended, so that its memory is free."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.sleep import SleepControl
from skyrl_tinker.inference.servers.health_checks import Loss
from tests.support.sampler_clients import opened_fleet, vllm_client


class Replica:
    """Answers vLLM's sleep routes, and notes what it was asked."""

    def __init__(self, *, fails: str = "") -> None:
        self.asked: list[str] = []
        self._fails = fails
        app = web.Application()
        app.router.add_post("/{route}", self._answer)
        self.server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        return web.Response(status=500 if request.path == self._fails else 200)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


class Processes:
    """Processes that never die, take time to be ended, and are not replaced."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    async def wait_lost(self, index: int) -> Loss:
        return await asyncio.Future()

    def suspect(self) -> None:
        pass

    async def end(self, index: int) -> bool:
        for _ in range(100):
            await asyncio.sleep(0)
        self.ended.append(index)
        return True

    async def replace(self, index: int) -> str:
        return await asyncio.Future()


@asynccontextmanager
async def fleet_of(*replicas: Replica) -> AsyncIterator[tuple[Fleet, Processes]]:
    for replica in replicas:
        await replica.server.start_server()
    processes = Processes()
    client = vllm_client(replicas[0].url, tuple(replica.url for replica in replicas))
    fleet = opened_fleet(client, processes)
    supervision = asyncio.create_task(fleet.supervise(AsyncMock(), AsyncMock()))
    await asyncio.sleep(0)
    yield fleet, processes
    supervision.cancel()
    await asyncio.wait([supervision])
    await client.close()
    for replica in replicas:
        await replica.server.close()


@pytest.mark.parametrize(("needed", "level"), [(True, 1), (False, 2)])
async def test_running_requests_are_kept_and_the_weights_come_back_first(*, needed: bool, level: int) -> None:
    """Weights that no request needs take no host memory meanwhile."""
    replicas = Replica(), Replica()
    async with fleet_of(*replicas) as (fleet, _):
        control = SleepControl(fleet, lambda: not needed)
        await control.sleep()
        await control.wake_weights()
        await control.wake_caches()
    for replica in replicas:
        assert replica.asked == [
            f"/sleep?level={level}&mode=keep",
            "/wake_up?tags=weights",
            "/wake_up?tags=kv_cache",
        ]


async def test_a_replica_that_does_not_sleep_or_wake_is_ended_and_the_others_go_on() -> None:
    sound, restless, drowsy = Replica(), Replica(fails="/sleep"), Replica(fails="/wake_up")
    async with fleet_of(sound, restless, drowsy) as (
        fleet,
        processes,
    ):
        control = SleepControl(fleet, lambda: False)
        await control.sleep()
        assert processes.ended == [1], "its memory must be free when this returns"
        await control.wake_weights()
        assert processes.ended == [1, 2]
        assert fleet.client.server_urls == (sound.url,)
    assert drowsy.asked == ["/sleep?level=1&mode=keep", "/wake_up?tags=weights"]
