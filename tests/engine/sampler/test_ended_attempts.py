"""Attempts at samples that a silent replica may hold are ended, in the tasks that make them."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.inference.servers.health_checks import Loss

URL = "http://10.0.0.2:8100"
SILENT = Loss(0, URL, "its core does not answer", silent=True)


class Servers:
    """Replicas whose end nobody can confirm."""

    def suspect(self) -> None: ...

    async def end(self, index: int) -> bool:
        return False


@pytest.fixture
def fleet() -> Fleet:
    client: Any = SimpleNamespace(proxy_url="", retarget=lambda *_: None)
    made = Fleet(client, (1,))
    made.open(cast(Any, Servers()), (URL,), None)
    return made


class Attempts:
    """The first one waits for an answer that never comes, and its end for `let_go`."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any] | None] = []
        self.let_go = asyncio.Event()

    async def __call__(self) -> str:
        self.tasks.append(asyncio.current_task())
        if len(self.tasks) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await self.let_go.wait()
        return "sampled"


async def test_what_a_silent_replica_may_hold_is_ended_and_made_again(fleet: Fleet) -> None:
    attempts = Attempts()
    sample = asyncio.create_task(fleet.with_retry(attempts))
    await asyncio.sleep(0)
    await fleet._end(SILENT)
    await asyncio.sleep(0)
    await fleet._end(SILENT)  # another one, while the attempt ends
    attempts.let_go.set()
    assert await sample == "sampled"
    assert attempts.tasks == [sample, sample], "no task is made for an attempt"


async def test_a_sample_that_is_cancelled_meanwhile_is_not_made_again(fleet: Fleet) -> None:
    attempts = Attempts()
    sample = asyncio.create_task(fleet.with_retry(attempts))
    await asyncio.sleep(0)
    await fleet._end(SILENT)
    sample.cancel()
    attempts.let_go.set()
    await asyncio.wait([sample])
    assert sample.cancelled()
    assert len(attempts.tasks) == 1


async def test_an_attempt_s_own_timeout_is_its_error(fleet: Fleet) -> None:
    with pytest.raises(TimeoutError, match="its own"):
        await fleet.with_retry(AsyncMock(side_effect=TimeoutError("its own")))
