"""Lists and reports, which clients can make slow: read off the event loop, and no result waits for them.

Of each owner one is read at a time.
"""

from collections.abc import Mapping
from unittest.mock import Mock

import pytest

from skyrl_tinker.domain.ids import CheckpointKind, OwnerId
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import World, sample, sample_output

PROTOBUF = "application/x-protobuf"
LISTS = (
    "audit?event_type=all",
    "billing/usage/checkpoints/current",
    "billing/usage/events?starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z",
    "checkpoints",
    "console/requests",
    "console/requests/{request}/items",
    "console/requests/{request}/tokens",
    "console/runs",
    "console/runs/{run}",
    "console/runs/{run}/metrics",
    "console/runs/{run}/points",
    "console/runs/{run}/points.csv",
    "console/trace",
    "sessions",
    "sessions/{session}",
    "training_runs",
    "training_runs/{run}",
    "training_runs/{run}/checkpoints",
)


@pytest.fixture
async def made(world: World) -> Mapping[str, str]:
    """Work of the first owner, who also asks from then on."""
    speak_as(world, await new_user(world, "alice"))
    session = await world.session()
    run = await world.model(session)
    await world.checkpoint(run, CheckpointKind.WEIGHTS, "a")
    request = (await world.ok("asample", sample(await world.sampler(session), 0)))["request_id"]
    await world.succeed(request, PROTOBUF, sample_output([5] * 20_000))
    return {"session": session, "run": run, "request": str(request)}


def owners(report: Mock) -> set[object]:
    """Return whose reports were read."""
    return {each.args[1] for each in report.call_args_list}


def spied(world: World) -> Mock:
    report = Mock(wraps=world.services.store.report)
    world.patch.setattr(world.services.store, "report", report)
    return report


@pytest.mark.parametrize("path", LISTS)
async def test_it_is_read_apart(world: World, made: Mapping[str, str], path: str) -> None:
    report = spied(world)
    answer = await world.http.get(path.format(**made))
    assert answer.status_code in (200, 404), answer.text
    assert owners(report) == {OwnerId(1)}


async def test_so_is_a_search(world: World, made: Mapping[str, str]) -> None:
    report = spied(world)
    await world.ok("sessions/search", {})
    assert owners(report) == {OwnerId(1)}


async def test_so_is_a_trace_which_its_url_alone_opens(world: World, made: Mapping[str, str]) -> None:
    url = (await get(world, f"sessions/{made['session']}/trace_export"))["url"]
    report = spied(world)
    answer = await world.http.get(url, headers={"X-API-Key": ""})
    assert answer.status_code == 200, answer.text
    assert owners(report) == {OwnerId(1)}


async def test_a_large_result_is_not(world: World, made: Mapping[str, str]) -> None:
    report = spied(world)
    answer = await world.result(made["request"], Accept=PROTOBUF)
    assert (answer.status_code, len(answer.content) > 1 << 15, report.called) == (200, True, False)
