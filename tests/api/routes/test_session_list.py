"""Sessions: listed, looked into, searched, moved."""

from typing import Any

from skyrl_tinker.domain.ids import CheckpointKind
from tests.api.support.metadata import check_search
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import BASE, Json, World


async def opened(world: World, **fields: Any) -> str:
    return str((await world.ok("create_session", {"sdk_version": "0.38.0", **fields}))["session_id"])


async def search(world: World, **wanted: Any) -> list[str]:
    return [each["session_id"] for each in (await world.ok("sessions/search", wanted))["sessions"]]


async def test_sessions_are_listed_newest_first_in_pages(world: World) -> None:
    made = [await world.session() for _ in range(3)]
    assert (await get(world, "sessions"))["sessions"] == made[::-1]
    assert (await get(world, "sessions", limit=2, offset=1))["sessions"] == made[1::-1]


async def test_a_session_tells_what_it_has_made(world: World) -> None:
    session = await opened(world, user_metadata={"a": "b", "n": [1]}, display_name="try 7")
    run, sampler = await world.model(session), await world.sampler(session)
    assert await get(world, f"sessions/{session}", access_scope="accessible") == {
        "training_run_ids": [run],
        "sampler_ids": [sampler],
        "user_metadata": {"a": "b", "n": "[1]"},
        "display_name": "try 7",
    }
    sampled = {"sampler_id": sampler, "base_model": BASE, "model_path": None}
    assert await get(world, f"samplers/{sampler}") == sampled


async def test_others_do_not_see_a_session(world: World) -> None:
    alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
    speak_as(world, alice)
    session = await world.session()
    speak_as(world, bob)
    assert (await get(world, "sessions", access_scope="accessible"))["sessions"] == []
    assert (await world.http.get(f"sessions/{session}")).status_code == 404
    put = await world.http.put(f"sessions/{session}/project", json={"project_id": "mine"})
    assert put.status_code == 404
    for owner in ({"type": "accessible"}, {"type": "user", "owner_urns": ["tml:user:alice"]}):
        assert await search(world, owner=owner) == []
    mine = await world.session()
    assert await search(world, owner={"type": "user", "owner_urns": ["tml:user:bob"]}) == [mine]


async def test_metadata_of_any_kind_is_found_in_its_displayed_form(world: World) -> None:
    await check_search(world)


async def test_what_a_search_finds_is_described(world: World) -> None:
    session = await opened(world, user_metadata={"n": 1}, display_name="One", project_id="p")
    run = await world.model(session)
    await world.checkpoint(run, CheckpointKind.WEIGHTS, "a", size_bytes=7)
    await world.checkpoint(run, CheckpointKind.WEIGHTS, "b", size_bytes=5)
    (found,) = (await world.ok("sessions/search", {}))["sessions"]
    assert found.pop("created_at").endswith("Z")
    assert found == {
        "session_id": session,
        "owner": "tml:user:local",
        "project_id": "p",
        "status": {"type": "active"},
        "checkpoints_count": 2,
        "checkpoint_storage_bytes": 12,
        "display_name": "One",
        "user_metadata": {"n": "1"},
    }


SEARCHES: list[tuple[Json, list[int]]] = [
    ({}, [2, 1, 0]),
    ({"user_metadata": {"kind": "sft"}}, [1, 0]),
    ({"user_metadata": {"kind": "sft", "seed": "2"}}, [1]),
    ({"user_metadata": {"flag": "true"}}, [2]),
    ({"user_metadata": {'"; DROP': "x"}}, []),
    ({"display_name": "run ALPHA"}, [0]),
    ({"display_name": "%"}, []),
    ({"display_name": " "}, [2, 1, 0]),
    ({"project_ids": ["p", "q"]}, [1]),
    ({"project_ids": ["default"]}, [2, 0]),
    ({"project_ids": []}, []),
    ({"display_name": "alpha", "project_ids": ["p"]}, []),
    ({"statuses": [{"type": "active"}]}, [2]),
    ({"statuses": [{"type": "client_finished"}]}, [1, 0]),
    ({"statuses": [{"type": "client_finished", "reasons": ["errored"]}]}, [1]),
    ({"statuses": [{"type": "failed"}, {"type": "cancelled"}]}, []),
]


async def test_a_search_finds_what_fits_all_conditions(world: World) -> None:
    made = [
        await opened(world, user_metadata={"kind": "sft", "seed": 1}, display_name="Alpha run"),
        await opened(
            world, user_metadata={"kind": "sft", "seed": 2}, display_name="beta run", project_id="p"
        ),
        await opened(world, user_metadata={"kind": "rl", "flag": True}),
    ]
    for session, reason in ((made[0], "success"), (made[1], "errored")):
        await world.ok(f"sessions/{session}/finish", {"reason": {"type": reason}, "detail": "d"})
    for wanted, numbers in SEARCHES:
        assert await search(world, **wanted) == [made[number] for number in numbers], wanted
    either = {"session_id": made[2], "display_name": "alpha"}
    assert await search(world, **either) == [made[2], made[0]]
    assert await search(world, session_id="no") == []


async def test_pages_of_a_search_are_all_sessions_once(world: World) -> None:
    made = [await world.session() for _ in range(7)]
    found: list[str] = []
    cursor: Json | None = {}
    while cursor is not None:
        answer = await world.ok("sessions/search", {"limit": 3, **({"cursor": cursor} if cursor else {})})
        found += [each["session_id"] for each in answer["sessions"]]
        cursor = answer["next_cursor"]
    assert found == made[::-1]


async def test_a_finished_session_says_how(world: World) -> None:
    session = await world.session()
    detail = "ctrl-c" + "!" * 100_000
    await world.ok(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}, "detail": detail})
    (found,) = (await world.ok("sessions/search", {}))["sessions"]
    reason = {"type": "interrupted"}
    assert found["status"] == {"type": "client_finished", "reason": reason, "detail": detail[:16_384]}


WRONG: list[tuple[Json, str]] = [
    ({"limit": 0}, "limit"),
    ({"limit": 201}, "limit"),
    ({"user_metadata": {"a": 1}}, "user_metadata"),
    ({"statuses": []}, "statuses"),
    ({"statuses": [{"type": "lost"}]}, "statuses"),
    ({"display_name": ""}, "display_name"),
    ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}}, "cursor"),
    ({"owner": {"type": "all"}}, "owner"),
]


async def test_a_wrong_search_is_told_what_is_wrong(world: World) -> None:
    for wanted, message in WRONG:
        answer = await world.post("sessions/search", wanted)
        assert answer.status_code == 400, wanted
        assert message in answer.json()["detail"]


async def test_a_project_needs_a_name(world: World) -> None:
    session = await world.session()
    for project in ("", None, "x" * 513):
        put = await world.http.put(f"sessions/{session}/project", json={"project_id": project})
        assert put.status_code == 400
        assert "project_id" in put.json()["detail"]
