"""The bill: every token and every byte, without prices."""

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from sqlalchemy import func, select, update

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.values import Usage
from skyrl_tinker.store import checkpoint_records, usage_records
from skyrl_tinker.store.database.tables import Future, Result, SavedCheckpoint
from skyrl_tinker.store.futures import finish as future_finish
from skyrl_tinker.store.retention import row_purges
from tests.api.support.passes import old_json
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import BASE, Json, World, sample
from tests.support.reads import reading
from tests.support.skew import skew

NOW = datetime.min  # the hour in which a test begins
SEQ = count(1)


@pytest.fixture(autouse=True)
def this_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "NOW", datetime.now(UTC).replace(minute=0, second=0, microsecond=0))


def hour(offset: int) -> datetime:
    return NOW + timedelta(hours=offset)


async def bill(world: World, first: int = -3, end: int = 1) -> Json:
    query = {"starting_on": hour(first).isoformat(), "ending_before": hour(end).isoformat()}
    return await get(world, "billing/usage/events", **query)


def infos(answer: Json, kind: str) -> list[Json]:
    return [event["event_info"] for event in answer["data"] if event["event_info"]["type"] == kind]


async def finish(world: World, request: Json, used: Usage, offset: int = -1) -> None:
    future = await world.id_of(request["request_id"])
    await world.store.write(lambda conn: future_finish.succeed(conn, future, "t", b"", used))
    at = (hour(offset) + timedelta(minutes=30)).timestamp()
    move = update(Future).where(Future.id == future).values(finished_at=at)
    await world.store.write(lambda conn: conn.execute(move))


async def kept(world: World, run: str, size: int, **times: float | None) -> None:
    """A checkpoint of that many bytes; times are hours from NOW."""
    name = f"c{next(SEQ)}"
    await world.checkpoint(run, CheckpointKind.WEIGHTS, name, size_bytes=size)
    values = {key: None if at is None else NOW.timestamp() + at * 3600 for key, at in times.items()}
    move = update(SavedCheckpoint).where(SavedCheckpoint.name == name).values(values)
    await world.store.write(lambda conn: conn.execute(move))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    skew(monkeypatch, 3 * 3600.0)


async def test_the_past_is_that_of_the_database(ahead: None, world: World) -> None:
    """By whose clock is recorded when something was used."""
    assert (await bill(world, first=2, end=4))["data"] == []


async def test_tokens_are_billed_by_what_was_done_with_them(world: World) -> None:
    session = await world.session()
    run, sampler = await world.model(session), await world.sampler(session)
    await finish(world, await world.ok("forward_backward", old_json(run, 1)), Usage(70))
    await finish(world, await world.ok("forward", old_json(run, 2, key="forward_input")), Usage(5), -2)
    await finish(world, await world.ok("asample", sample(sampler, 0)), Usage(100, 60, 9))
    answer = await bill(world)
    assert [(event["bucket_start"], event["event_info"]) for event in answer["data"]] == [
        (stamp(hour(-2)), {"type": "training", "token_count": 5}),
        (stamp(hour(-1)), {"type": "training", "token_count": 70}),
        (stamp(hour(-1)), {"type": "sampling_prefill", "cached": True, "token_count": 60}),
        (stamp(hour(-1)), {"type": "sampling_prefill", "cached": False, "token_count": 40}),
        (stamp(hour(-1)), {"type": "sampling_sample", "token_count": 9}),
    ]
    event = answer["data"][0]
    assert event["bucket_end"] == stamp(hour(-1))
    assert (event["session_id"], event["base_model"], event["project_id"]) == (session, BASE, None)
    assert (event["user_id"], event["user_name"]) == ("tml:user:local", "local")
    assert event["estimated_cost_usd"] is None
    assert answer["sessions"] == {session: {"user_metadata": {}}}


def stamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


async def test_openai_clients_of_an_owner_are_billed_as_a_session(world: World) -> None:
    for used in (Usage(100, 60, 9), Usage(10, 0, 1)):
        await world.store.write(lambda conn, used=used: usage_records.add_openai(conn, None, BASE, used))
    answer = await bill(world)
    assert [event["event_info"] for event in answer["data"]] == [
        {"type": "sampling_prefill", "cached": True, "token_count": 60},
        {"type": "sampling_prefill", "cached": False, "token_count": 50},
        {"type": "sampling_sample", "token_count": 10},
    ]
    assert {event["session_id"] for event in answer["data"]} == {"openai-0"}


async def test_the_bill_is_the_same_after_the_results_are_gone(world: World) -> None:
    sampler = await world.sampler()
    await finish(world, await world.ok("asample", sample(sampler, 0)), Usage(100, 60, 9))
    before = await bill(world)
    await world.store.write(usage_records.roll_up)
    await world.store.write(lambda conn: row_purges.purge_results(conn, NOW.timestamp() + 7200))
    with reading(world.store) as conn:
        assert conn.scalar(select(func.count()).select_from(Result)) == 0
    assert await bill(world) == before
    assert len(before["data"]) == 3


async def test_storage_is_billed_for_as_long_as_a_checkpoint_lived(world: World) -> None:
    run = await world.model()
    await kept(world, run, 10**9, created_at=-2.5, deleted_at=-0.75)
    await kept(world, run, 2 * 10**9, created_at=-1.5, expires_at=-1.25, deleted_at=-0.5)
    await kept(world, run, 10**12, created_at=-9, deleted_at=-4)
    await world.store.write(usage_records.roll_up)
    answer = await bill(world, -3, 0)
    hours = [each["gigabyte_hours"] for each in infos(answer, "storage")]
    assert hours == pytest.approx([0.5, 1 + 2 * 0.25, 0.25], abs=1e-6)
    assert [each["count"] for each in infos(answer, "checkpoint")] == [1, 1]


async def test_storage_that_goes_on_is_billed_until_now(world: World) -> None:
    await kept(world, await world.model(), 10**9, created_at=-1)
    before = (datetime.now(UTC) - NOW).total_seconds() / 3600
    first, second = (each["gigabyte_hours"] for each in infos(await bill(world, -2, 2), "storage"))
    after = (datetime.now(UTC) - NOW).total_seconds() / 3600
    assert first == pytest.approx(1)
    assert before - 1e-6 <= second <= after + 1e-6


async def test_removed_files_stay_on_the_bill(world: World) -> None:
    run = await world.model()
    await kept(world, run, 10**9, created_at=-2, deleted_at=-1)
    before = await bill(world)
    (gone,) = await world.store.read(lambda conn: checkpoint_records.list_garbage(conn, NOW.timestamp()))
    await world.store.write(lambda conn: checkpoint_records.mark_removed(conn, gone.id))
    with reading(world.store) as conn:
        assert checkpoint_records.list_garbage(conn, NOW.timestamp()) == []
    assert await bill(world) == before
    assert infos(before, "storage") == [{"type": "storage", "gigabyte_hours": 1.0}]


async def test_current_storage_is_told_by_project(world: World) -> None:
    runs = [await world.model() for _ in range(3)]
    await world.http.put(f"sessions/{runs[2].partition(':')[0]}/project", json={"project_id": "p"})
    for run, size in zip(runs, (10**9, 2 * 10**9, 5), strict=True):
        await kept(world, run, size, created_at=-1)
    await kept(world, runs[0], 10**12, deleted_at=-1)
    found = {
        item["project_id"]: item for item in (await get(world, "billing/usage/checkpoints/current"))["data"]
    }
    assert [(found[name]["checkpoint_count"], found[name]["size_bytes"]) for name in (None, "p")] == [
        (2, 3 * 10**9),
        (1, 5),
    ]
    assert found[None]["size_gigabytes"] == 3
    (only,) = (await get(world, "billing/usage/checkpoints/current", project_id="p"))["data"]
    assert only == found["p"]


async def test_everybody_has_a_bill_of_their_own(world: World) -> None:
    alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
    speak_as(world, alice)
    run, sampler = await world.model(), await world.sampler()
    await kept(world, run, 10**9, created_at=-1)
    await finish(world, await world.ok("asample", sample(sampler, 0)), Usage(100, 60, 9))
    assert (await bill(world))["data"][0]["user_name"] == "alice"
    speak_as(world, bob)
    assert (await bill(world))["data"] == []
    assert (await get(world, "billing/usage/checkpoints/current"))["data"] == []


async def test_a_stretch_of_time_that_cannot_be_is_refused(world: World) -> None:
    good = hour(-1).isoformat()
    cases: list[tuple[Any, Any, str]] = [
        (good, good, "ending_before"),
        (good, hour(-2).isoformat(), "ending_before"),
        (good, hour(14 * 24).isoformat(), "14 days"),
        (hour(2).isoformat(), hour(3).isoformat(), "starting_on"),
        ((hour(-1) + timedelta(minutes=1)).isoformat(), hour(1).isoformat(), "full hour"),
        ("2026-07-13T00:00:00", good, "starting_on"),
        ("x", good, "starting_on"),
        ("0001-01-01T00:00:00+05:00", good, "14 days"),
        (good, "9999-12-31T23:00:00-05:00", "14 days"),
    ]
    for first, end, message in cases:
        query = {"starting_on": first, "ending_before": end}
        answer = await world.http.get("billing/usage/events", params=query)
        assert answer.status_code == 400, query
        assert message in answer.json()["detail"]
