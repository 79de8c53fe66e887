"""Base models on demand, started and stopped over HTTP."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import psutil
import pytest

from skyrl_tinker.api.waiting import kept_value
from skyrl_tinker.config import BaseOverrides, Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.engine.http_server import EngineHttpServer
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.protocol.schemas.administration import ChangeBaseRequest
from skyrl_tinker.system.processes import identities, write_pid_file
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import BASE, FACTS, World, running
from tests.api.test_base_limits import ALIAS, OTHER, SMALL

ALWAYS = "org/always"
BASES = {SMALL: BaseOverrides(roles=("train", "sample"), start="on_demand"), ALWAYS: BaseOverrides()}


@pytest.fixture
async def world(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(kept_value, "KEPT_S", -1.0)
    always = replace(OTHER, directory="/models/always", names=(ALWAYS,))
    async with running(settings.model_copy(update={"bases": BASES}), FACTS, OTHER, always) as made:
        yield made


@asynccontextmanager
async def engine(world: World) -> AsyncIterator[list[ChangeBaseRequest]]:
    """Yield the changes that reach the engine."""
    asked: list[ChangeBaseRequest] = []

    def change(each: ChangeBaseRequest) -> str:
        asked.append(each)
        return f"{each.base_model}: {each.action}"

    view = QueuesView({}, {}, idle={SMALL: 7.5}, pids={SMALL: (os.getpid(),)})
    socket = Directories(world.settings).engine_socket
    openai, replicas = cast(Any, SimpleNamespace(routes=list)), AsyncMock(return_value=b"")
    server = EngineHttpServer(socket, openai, Metrics(), replicas, lambda: view, change, 1 << 20)
    await server.start()
    yield asked
    await server.close()


async def change(world: World, base_model: str, action: str = "stop") -> httpx.Response:
    return await world.post("console/admin/bases", {"base_model": base_model, "action": action})


async def test_a_start_and_a_stop_reach_the_engine_and_are_on_record(world: World) -> None:
    """By any of its names; on a server without keys they need none."""
    async with engine(world) as asked:
        for name, action in ((SMALL, "start"), (ALIAS, "stop")):
            answer = await change(world, name, action)
            assert (answer.status_code, answer.json()) == (
                200,
                {"base_model": SMALL, "detail": f"{SMALL}: {action}"},
            )
    assert [(each.base_model, each.action) for each in asked] == [(SMALL, "start"), (SMALL, "stop")]
    speak_as(world, await new_user(world, "root", admin=True))
    found = [entry for entry in (await get(world, "audit"))["entries"] if entry["event"].startswith("base_")]
    assert [(each["event"], each["event_details"]["base_model"]) for each in found] == [
        ("base_start", SMALL),
        ("base_stop", SMALL),
    ]


async def test_only_an_admin_starts_and_stops_where_there_are_keys(world: World) -> None:
    speak_as(world, await new_user(world, "alice"))
    async with engine(world) as asked:
        answer = await change(world, SMALL)
        assert (answer.status_code, asked) == (403, [])
        assert "expected an admin key" in answer.text
        speak_as(world, await new_user(world, "root", admin=True))
        assert (await change(world, SMALL)).status_code == 200
    details = [each["event_details"] for each in (await get(world, "audit"))["entries"]]
    assert {"key_id": None, "key": None, "by": "root", "base_model": SMALL} in details


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            BASE,
            f"base_model: found '{BASE}', which always runs as the first one, expected one on demand: "
            f"{SMALL}",
        ),
        (
            ALWAYS,
            f"base_model: found '{ALWAYS}', which always runs, expected one on demand: {SMALL}; set start = "
            '"on_demand" in its table of bases, and start the server again',
        ),
        ("no/such", f"base_model is 'no/such', expected one that is served: {BASE}, {SMALL}, {ALWAYS}"),
    ],
)
async def test_one_that_is_not_on_demand_is_refused_by_name(world: World, name: str, told: str) -> None:
    async with engine(world) as asked:
        answer = await change(world, name)
    assert (answer.status_code, answer.json()["detail"], asked) == (400, told, [])


async def test_an_engine_that_is_away_is_told(world: World) -> None:
    await world.set_engine("restarting", "rank 0 died")
    answer = await change(world, SMALL)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert answer.json()["detail"] == "the engine is restarting: rank 0 died; try again"
    speak_as(world, await new_user(world, "root", admin=True))
    (entry,) = [each for each in (await get(world, "audit"))["entries"] if each["event"].startswith("base_")]
    assert (entry["event"], entry["event_details"]["error"]) == (
        "base_stop",
        "the engine is restarting: rank 0 died; try again",
    )


async def test_memory_is_that_of_the_processes_of_a_base_model_and_not_for_everybody(world: World) -> None:
    pid_file = Directories(world.settings).pid_file
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    write_pid_file(pid_file, identities([psutil.Process()]))
    async with engine(world):
        told = await get(world, "console/now")
        speak_as(world, await new_user(world, "alice"))
        hidden = await get(world, "console/now")
    (row,) = told["processes"]
    assert row["base_model"] == SMALL
    assert [each["rss_bytes"] for each in told["server"]["base_models"]] == [None, row["rss_bytes"], None]
    assert [each["rss_bytes"] for each in hidden["server"]["base_models"]] == [None] * 3


async def test_it_is_listed_how_each_starts_since_when_and_how_long_it_is_idle(world: World) -> None:
    status = EngineStatus(world.store, world.bell)
    await status.report("ready", "", {BASE: ("ready", ""), SMALL: ("stopped", ""), ALWAYS: ("ready", "")})
    async with engine(world):
        first = (await get(world, "console/now"))["server"]["base_models"]
        assert [(each["start"], each["idle_s"]) for each in first] == [
            ("always", None),
            ("on_demand", 7.5),
            ("always", None),
        ]
        await status.report("ready", "", {BASE: ("ready", "a"), SMALL: ("ready", ""), ALWAYS: ("ready", "")})
        later = (await get(world, "console/now"))["server"]["base_models"]
    changed = [before["since"] < after["since"] for before, after in zip(first, later, strict=True)]
    assert changed == [False, True, False]
