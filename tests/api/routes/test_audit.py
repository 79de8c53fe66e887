"""The audit log: what was done, by day and by kind."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from skyrl_tinker.api.routes import audit
from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.store.database.tables import AuditEvent
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import World


async def events(world: World, **query: object) -> list[str]:
    return [entry["event"] for entry in (await get(world, "audit", **query))["entries"]]


async def test_what_is_done_to_sessions_and_checkpoints_is_on_record(world: World) -> None:
    session = await world.session()
    path = await world.checkpoint(await world.model(session), CheckpointKind.WEIGHTS, "a")
    url = f"training_runs/{session}:train:0/checkpoints/weights/a"
    await world.http.post(f"{url}/publish")
    await world.http.put(f"{url}/ttl", json={"ttl_seconds": 3600})
    await world.http.delete(f"{url}/publish")
    await world.http.delete(url)
    await world.http.put(f"sessions/{session}/project", json={"project_id": "p"})
    await world.ok(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    of_checkpoints = [
        f"checkpoint_{action}" for action in ("create", "publish", "set_ttl", "unpublish", "delete")
    ]
    assert await events(world) == ["session_create", *of_checkpoints, "project_session_add", "session_finish"]
    assert await events(world, event_type="checkpoints") == of_checkpoints
    assert await events(world, event_type="projects") == ["project_session_add"]
    assert await events(world, event_type="teams") == []
    entries = (await get(world, "audit"))["entries"]
    assert {entry["event_details"]["session_id"] for entry in entries} == {session}
    assert {entry["tinker_path"] for entry in entries} == {None, path}
    assert entries[1]["event_details"]["size_bytes"] == 10
    assert datetime.fromisoformat(entries[0]["timestamp"]).tzinfo


async def test_repeating_what_is_done_already_is_no_event(world: World) -> None:
    run = await world.model()
    await world.checkpoint(run, CheckpointKind.WEIGHTS, "a")
    for _ in range(3):
        await world.http.post(f"training_runs/{run}/checkpoints/weights/a/publish")
    assert (await events(world, event_type="checkpoints")).count("checkpoint_publish") == 1


async def test_a_day_of_many_events_is_read_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "PAGE", 2)
    key = await new_user(world, "root", admin=True)
    await new_user(world, "alice")
    speak_as(world, key)
    made = [await world.session() for _ in range(7)]
    at = datetime.now(UTC).replace(hour=12).timestamp()
    move = update(AuditEvent).where(AuditEvent.id > 2).values(at=at)
    await world.store.write(lambda conn: conn.execute(move))
    answer = await world.http.get("audit")
    entries = answer.json()["entries"]
    seen = [entry["event_details"].get("session_id") for entry in entries]
    assert sorted(filter(None, seen)) == sorted(made)
    assert seen.count(None) == 2
    times = [entry["timestamp"] for entry in entries]
    assert times == sorted(times)


async def test_a_day_is_one_of_utc(world: World) -> None:
    today = datetime.now(UTC).date()
    for offset in range(4):
        await world.session()
        start = datetime(today.year, today.month, today.day, tzinfo=UTC).timestamp() - 2 * 86400
        at = start + (0, 86399.999, 86400, -0.001)[offset]
        move = update(AuditEvent).where(AuditEvent.id == offset + 1).values(at=at)
        await world.store.write(lambda conn, move=move: conn.execute(move))
    assert await events(world) == []
    assert len(await events(world, day=today - timedelta(days=2))) == 2
    assert len(await events(world, day=today - timedelta(days=1))) == 1


async def test_others_events_are_theirs(world: World) -> None:
    alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
    speak_as(world, alice)
    await world.session()
    speak_as(world, bob)
    assert await events(world) == ["key_create"]


async def test_a_wrong_question_is_400(world: World) -> None:
    for query in ("event_type=sessions", "day=yesterday", "day=2026-02-30"):
        answer = await world.http.get(f"audit?{query}")
        assert answer.status_code == 400, query
        assert query.partition("=")[0] in answer.json()["detail"]


async def test_the_first_and_the_last_day_of_the_calendar_are_days(world: World) -> None:
    for day in ("0001-01-01", "9999-12-31"):
        assert await events(world, day=day) == []
