"""A newcomer is a member only with all that the others have. The servers are scripted."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.health_checks import Loss
from tests.engine.support.simulation import simulated
from tests.support.sampler_clients import opened_fleet, vllm_client
from tests.support.waiting import end, until

OLD, NEW = "http://old", "http://new"


class Servers:
    def __init__(self) -> None:
        self.dies = asyncio.Event()
        self.ended: list[int] = []

    async def wait_lost(self, index: int) -> Loss:
        await self.dies.wait()
        return Loss(index, NEW, "it died")

    def suspect(self) -> None:
        pass

    async def end(self, index: int) -> bool:
        self.ended.append(index)
        return True

    async def replace(self, index: int) -> str:
        return NEW


async def test_a_loss_is_noted_at_the_time_of_the_given_clock() -> None:
    """The database's, as the age of an incident is told by it."""
    fleet = opened_fleet(vllm_client(OLD, (OLD,)), Servers(), clock=lambda: 5.0)
    supervising = asyncio.create_task(fleet.supervise(AsyncMock(), AsyncMock()))
    fleet.condemn(OLD, "it stands still")
    await until(lambda: fleet.incidents)
    await end(supervising)
    assert [incident.at for incident in fleet.incidents] == [5.0]


@simulated
async def test_what_equips_a_newcomer_that_dies_tidies_up_before_others_change_anything() -> None:
    """A weight sync that breaks off still speaks over the transport which the next one needs."""
    servers, steps = Servers(), list[str]()
    fleet = opened_fleet(vllm_client(OLD, (OLD,)), servers)

    async def equip(newcomer: RemoteInferenceClient) -> None:
        servers.dies.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            steps.append("tidied up")

    async def change() -> None:
        async with fleet.changing.hold():
            steps.append("changed")

    admitting = asyncio.create_task(fleet._admit(0, NEW, equip))
    await asyncio.sleep(0)
    await change()
    with pytest.raises(SamplerError, match="it died"):
        await admitting
    assert steps == ["tidied up", "changed"]
    assert servers.ended == [0]
