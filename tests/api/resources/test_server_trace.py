"""The trace of a server: what each request did when, and whose requests it has."""

import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import orjson
import pytest

from skyrl_tinker.api.resources.server_trace import trace_of
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import FutureStatus, RequestKind
from skyrl_tinker.engine.telemetry import activity_log
from skyrl_tinker.engine.telemetry.activity_log import ActivityLog
from skyrl_tinker.protocol.activity import Activity, RankSpan, SampleSpan, SyncSpan, UnitSpan
from skyrl_tinker.store.console.traced_requests import TracedRequest
from skyrl_tinker.training.actors import RankReply
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.waiting import Waiting, ready_model, submit, waiting
from tests.api.support.world import World, sample, step
from tests.engine.support.rows import queued
from tests.support.skew import skew


@pytest.fixture
async def busy(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Waiting]:
    """On a database whose clock is behind: all times of a trace are of it."""
    skew(monkeypatch, -7200.0)
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
    names = {each["args"]["name"] for each in found if each["name"] == "process_name"}
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


async def test_addresses_of_replicas_are_told_to_who_sees_all(world: World) -> None:
    root = await new_user(world, "root", admin=True)
    alice = await new_user(world, "alice")
    speak_as(world, alice)
    request = (await world.ok("asample", sample(await world.sampler(), 0)))["request_id"]
    at = world.store.now()
    span = SampleSpan(await world.id_of(request), at, at, ("10.0.0.2:8100",))
    world.patch.setattr(
        world.services.engine, "ask", AsyncMock(return_value=Activity(samples=(span,)).to_bytes())
    )
    for key, shown in ((alice, False), (root, True)):
        speak_as(world, key)
        answer = await world.http.get("console/trace")
        assert request in answer.text
        assert ("10.0.0.2" in answer.text) is shown


def test_the_log_is_bounded_and_gives_what_ended_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_log, "SPANS", 3)
    log = ActivityLog(lambda: time.time() + 7200)
    for number in range(5):
        log.sample(number, 0.0)
    log.publish("lora", 9, 1.5)
    log.sync("tiny", "v1", 2.0, 0.5)
    log.ranks("tiny", "run_pass", [RankReply(None, 1.0, 0.5), RankReply(None, 1.0, 0.25)])
    log.unit("tiny", [queued(9, 1, 1, tokens=10)], 0.0)  # type: ignore[arg-type]
    told = log.since(0.0)
    assert [span.future_id for span in told.samples] == [2, 3, 4]
    assert told.publishes[0].ended_at - told.publishes[0].began_at == pytest.approx(1.5)
    assert (told.units[0].future_ids, told.units[0].tokens) == ((9,), 10)
    ranks = told.units[0].ranks
    assert [(span.rank, span.method) for span in ranks] == [(0, "run_pass"), (1, "run_pass")]
    assert [span.ended_at - span.began_at for span in ranks] == pytest.approx([0.5, 0.25])
    assert [span.began_at for span in ranks] == pytest.approx([7201.0] * 2, abs=60.0), "as on the given clock"
    (sync,) = told.syncs
    assert (sync.ended_at - sync.began_at, sync.ended_at - sync.paused_at) == pytest.approx((2.0, 0.5))
    log.unit("tiny", [queued(10, 1, 2, tokens=10)], 0.0)  # type: ignore[arg-type]
    assert log.since(0.0).units[1].ranks == (), "calls belong to the unit in which they were made"
    assert log.since(time.time() + 7201) == Activity()


def test_ranks_are_threads_of_the_trainer_and_samples_name_their_replicas() -> None:
    ranks = (RankSpan(0, "run_pass", 1.0, 1.5), RankSpan(1, "run_pass", 1.0, 1.25))
    activity = Activity(
        (UnitSpan("forward_backward", 0.5, 2.0, 10, (7,), ranks),),
        (SampleSpan(8, 0.5, 2.0, ("127.0.0.1:5", "127.0.0.1:6")),),
        (),
        (SyncSpan("v1", 3.0, 3.5, 4.0),),
    )
    request = TracedRequest(
        8, "r", RequestKind.SAMPLE, 0, FutureStatus.DONE, 0.0, 2.0, None, "s:sample:0", "s", None
    )
    found = orjson.loads(trace_of([request], activity))["traceEvents"]
    assert [each["args"]["name"] for each in found if each.get("name") == "thread_name"] == [
        "units",
        "rank 0",
        "rank 1",
    ]
    complete = [(each["name"], each["tid"], each["ts"], each["dur"]) for each in found if each["ph"] == "X"]
    assert complete == [
        ("forward_backward", 0, 500_000, 1_500_000),
        ("run_pass", 1, 1_000_000, 500_000),
        ("run_pass", 2, 1_000_000, 250_000),
        ("sync v1", 0, 3_000_000, 1_000_000),
        ("samplers pause", 0, 3_500_000, 500_000),
    ]
    (run,) = [each for each in found if (each["name"], each["ph"]) == ("run", "b")]
    assert run["args"] == {"replicas": ["127.0.0.1:5", "127.0.0.1:6"]}


def test_units_of_two_base_models_which_run_at_once_have_threads_of_their_own() -> None:
    ranks = {name: (RankSpan(0, "run_pass", 1.0, 1.5),) for name in ("A", "B")}
    units = [UnitSpan("forward_backward", 0.5, 2.0, 10, (7,), ranks[name], name) for name in ranks]
    found = orjson.loads(trace_of([], Activity(tuple(units))))["traceEvents"]
    threads = {each["tid"]: each["args"]["name"] for each in found if each.get("name") == "thread_name"}
    assert [threads[each["tid"]] for each in found if each["ph"] == "X"] == [
        "A: units",
        "A: rank 0",
        "B: units",
        "B: rank 0",
    ]


def test_tracks_have_the_name_of_their_session_and_samplers_of_one_session_share_a_track() -> None:
    rest = (FutureStatus.DONE, 0.0, 2.0)
    requests = [
        TracedRequest(1, "a", RequestKind.FORWARD_BACKWARD, 0, *rest, "s:train:0", None, "s", "letters"),
        TracedRequest(2, "b", RequestKind.SAMPLE, 0, *rest, None, "s:sample:0", "s", "letters"),
        TracedRequest(3, "c", RequestKind.SAMPLE, 0, *rest, None, "s:sample:1", "s", "letters"),
        TracedRequest(4, "d", RequestKind.SAMPLE, 0, *rest, None, "t:sample:0", "t", None),
    ]
    found = orjson.loads(trace_of(requests, Activity()))["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in found if each["name"] == "process_name"}
    tracks = [names[each["pid"]] for each in found if each["ph"] == "b"]
    assert tracks == ["run letters", "samples of letters", "samples of letters", "samples of t"]
    labels = [each["args"]["labels"] for each in found if each["name"] == "process_labels"]
    assert labels == ["s:train:0", "s", "t"], "which tell runs of one name apart"
