"""The trace of a server: what each request did when, and whose requests it has."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.engine.telemetry import activity_log
from skyrl_tinker.engine.telemetry.activity_log import ActivityLog
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.waiting import Waiting, ready_model, submit, waiting
from tests.api.support.world import World, sample, step
from tests.engine.support.rows import queued


@pytest.fixture
async def busy(settings: Settings) -> AsyncIterator[Waiting]:
    async with waiting(settings) as made:
        made.samplers.go_on.set()
        yield made


async def events(world: World) -> list[dict[str, Any]]:
    return (await get(world, "console/trace"))["traceEvents"]


async def test_a_request_has_its_wait_its_run_and_its_answer(busy: Waiting) -> None:
    model = await ready_model(busy.api)
    stepped = await submit(busy.api, "optim_step", step(model, 1))
    sampled = await submit(busy.api, "asample", sample(await busy.api.sampler(), 0))
    for request in (stepped, sampled):
        assert (await busy.api.result(request, Accept="application/x-protobuf")).status_code == 200
    found = await events(busy.api)
    for request, kind in ((stepped, "optim_step"), (sampled, "sample")):
        number = next(each["id"] for each in found if each.get("args", {}).get("request_id") == request)
        parts = [each for each in found if each.get("id") == number and each["cat"] == "request"]
        assert [each["name"] for each in parts if each["ph"] == "b"][:3] == [kind, "wait", "run"]
        begun = [each["ts"] for each in parts if each["ph"] == "b"]
        assert begun == sorted(begun)
        assert len([each for each in parts if each["ph"] == "e"]) == len(begun)
    units = [each for each in found if each["ph"] == "X"]
    assert [each["name"] for each in units] == ["create_model", "optim_step"]
    names = {each["args"]["name"] for each in found if each["ph"] == "M"}
    assert f"run {model}" in names
    assert [each["args"] for each in found if each["ph"] == "C"][-1] == {"training": 0, "sampling": 0}


async def test_a_trace_has_the_callers_requests_only(world: World) -> None:
    keys = {name: await new_user(world, name) for name in ("alice", "bob")}
    asked = {}
    for name, key in keys.items():
        speak_as(world, key)
        asked[name] = (await world.ok("asample", sample(await world.sampler(), 0)))["request_id"]
    for name, key in keys.items():
        speak_as(world, key)
        told = [each["args"]["request_id"] for each in await events(world) if each["ph"] == "b"]
        assert told == [asked[name]]


def test_the_log_is_bounded_and_gives_what_ended_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_log, "SPANS", 3)
    log = ActivityLog()
    for number in range(5):
        log.sample(number, 0.0)
    log.publish("lora", 9, 1.5)
    log.unit([queued(9, 1, 1, tokens=10)], 0.0)  # type: ignore[arg-type]
    told = log.since(0.0)
    assert [span.future_id for span in told.samples] == [2, 3, 4]
    assert told.publishes[0].ended_at - told.publishes[0].began_at == pytest.approx(1.5)
    assert (told.units[0].future_ids, told.units[0].tokens) == ((9,), 10)
    assert log.since(told.units[0].ended_at + 1).units == ()
