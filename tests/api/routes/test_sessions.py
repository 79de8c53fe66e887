"""Sessions: opened by SDKs of every age, kept alive, finished once."""

import asyncio
from typing import Any

import pytest

from tests.api.support.world import BASE, World, sample, step


@pytest.mark.parametrize(
    "body",
    [
        {"tags": ["a"], "user_metadata": {"x": [1]}, "sdk_version": "0.38.0", "type": "create_session"},
        {"tags": [], "user_metadata": None, "sdk_version": "0.3.0", "project_id": None},
        {},
    ],
)
async def test_a_session_opens_for_old_and_new_sdks(world: World, body: dict[str, Any]) -> None:
    session = (await world.ok("create_session", body))["session_id"]
    assert "/" not in session
    assert (await world.ok("session_heartbeat", {"session_id": session}))["type"] == "session_heartbeat"


async def test_a_session_opened_meanwhile_says_what_the_engine_is_busy_with(world: World) -> None:
    """Else an SDK says nothing until the first request is done."""
    assert (await world.ok("create_session", {}))["warning_message"] is None
    await world.set_engine("starting", "replaying 12 of 40 units")
    warning = (await world.ok("create_session", {}))["warning_message"]
    assert "not ready: its engine is starting (replaying 12 of 40 units)" in warning
    assert "Requests are accepted and wait" in warning
    await world.set_engine("failed", "/srv/h/models/a cannot be read")
    warning = (await world.ok("create_session", {}))["warning_message"]
    assert "its engine is failed (…/a cannot be read)" in warning


async def test_after_finish_heartbeats_and_submits_answer_410(world: World) -> None:
    session = await world.session()
    model, sampler = await world.model(session), await world.sampler(session)
    finish = {"reason": {"type": "success"}, "detail": None}
    assert (await world.post(f"sessions/{session}/finish", finish)).status_code == 200
    late = [
        ("session_heartbeat", {"session_id": session}),
        ("optim_step", step(model, 1)),
        ("asample", sample(sampler, 0)),
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": BASE, "lora_config": {}}),
        (
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 1, "base_model": BASE},
        ),
    ]
    for path, body in late:
        assert (await world.post(path, body)).status_code == 410, path


async def test_of_heartbeats_that_come_together_each_gets_its_own_answer(world: World) -> None:
    over, *live = [await world.session() for _ in range(5)]
    await world.ok(f"sessions/{over}/finish", {"reason": {"type": "success"}, "detail": None})
    sent = [over, *live, *live, "no", over]
    posts = (world.post("session_heartbeat", {"session_id": each}) for each in sent)
    answers = await asyncio.gather(*posts)
    assert [each.status_code for each in answers] == [410, *[200] * 8, 404, 410]


async def test_a_heartbeat_whose_client_goes_away_fails_no_other(world: World) -> None:
    sessions = [await world.session() for _ in range(2)]
    gone, stays = (
        asyncio.create_task(world.post("session_heartbeat", {"session_id": each})) for each in sessions
    )
    same = asyncio.create_task(world.post("session_heartbeat", {"session_id": sessions[0]}))
    await asyncio.sleep(0)
    gone.cancel()
    assert [(await each).status_code for each in (stays, same)] == [200, 200]


async def test_finishing_again_is_fine(world: World) -> None:
    session = await world.session()
    for reason in ("errored", "success"):
        answer = await world.post(f"sessions/{session}/finish", {"reason": {"type": reason}, "detail": "d"})
        assert answer.status_code == 200


async def test_the_reason_of_a_newer_sdk_ends_a_session_too(world: World) -> None:
    session = await world.session()
    await world.ok(f"sessions/{session}/finish", {"reason": {"type": "abandoned", "by": "x"}, "detail": "d"})
    beat = await world.post("session_heartbeat", {"session_id": session})
    assert (beat.status_code, "finished (abandoned)" in beat.json()["detail"]) == (410, True)
    (found,) = (await world.ok("sessions/search", {"session_id": session}))["sessions"]
    assert found["status"] is None


async def test_an_unknown_session_is_404(world: World) -> None:
    assert (await world.post("session_heartbeat", {"session_id": "no"})).status_code == 404
    assert (await world.post("sessions/no/finish", {})).status_code == 404
    model = {"session_id": "no", "model_seq_id": 0, "base_model": BASE, "lora_config": {}}
    assert (await world.post("create_model", model)).status_code == 404


@pytest.mark.parametrize(
    ("route", "field", "wrong"),
    [
        ("create_session", "tags.1", {"tags": ["a", "a\0b"]}),
        ("create_session", "user_metadata", {"user_metadata": {"k": ["x", {"y": "a\0b"}]}}),
        ("create_session", "user_metadata", {"user_metadata": {"a\0b": 1}}),
        ("create_session", "display_name", {"display_name": "a\0b"}),
        ("create_session", "project_id", {"project_id": "a\0b"}),
        ("create_session", "sdk_version", {"sdk_version": "a\0b"}),
        ("create_model", "base_model", {"base_model": "a\0b"}),
        ("create_model", "user_metadata", {"user_metadata": {"k": "a\0b"}}),
        ("sessions/search", "user_metadata", {"user_metadata": {"k": "a\0b"}}),
        ("session_heartbeat", "session_id", {"session_id": "a\0b"}),
        ("sessions/any/finish", "reason.type", {"reason": {"type": "a\0b"}}),
    ],
)
async def test_a_nul_is_refused_by_the_name_of_its_field(
    world: World, route: str, field: str, wrong: dict[str, Any]
) -> None:
    """On SQLite too, which could store it: so clients see one server."""
    needed = {"session_id": await world.session(), "model_seq_id": 0, "base_model": BASE}
    answer = await world.post(route, (needed if route == "create_model" else {}) | wrong)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(rf"{field}: 'a\x00b' has the character NUL, expected text")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**300])
async def test_an_integer_that_would_become_a_float_is_refused_by_its_name(world: World, number: int) -> None:
    """In metadata of any depth, which answers and searches would have in another form."""
    metadata = {"a": 2**64 - 1, "b": {"c": [0, {"d": number}]}}
    needed = {"session_id": await world.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {}}
    for route in ("create_session", "create_model"):
        body = (needed if route == "create_model" else {}) | {"user_metadata": metadata}
        answer = await world.post(route, body)
        detail = f"user_metadata: 'b.c.1.d' is {number}"[:60]
        assert (answer.status_code, answer.json()["detail"][: len(detail)]) == (400, detail)
        assert "expected an integer from -2^63 to 2^64 - 1" in answer.json()["detail"]


@pytest.mark.parametrize("route", ["training_runs", "billing/usage/checkpoints/current", "console/runs"])
async def test_a_nul_in_a_query_is_refused_by_the_name_of_its_field(world: World, route: str) -> None:
    name = "search" if route == "console/runs" else "project_id"
    answer = await world.http.get(route, params={name: "a\0b"})
    assert answer.status_code == 400
    assert rf"query.{name}: 'a\x00b' has the character NUL" in answer.json()["detail"]


async def test_metadata_of_a_save_with_a_nul_fails_the_save_alone(world: World) -> None:
    model = await world.model()
    save = {"model_id": model, "seq_id": 1, "path": "a", "user_metadata": {"k": "a\0b"}}
    for route in ("save_weights", "save_weights_for_sampler"):
        request = (await world.ok(route, save))["request_id"]
        assert r"user_metadata: 'a\x00b' has the character NUL" in await world.failure(request)
        save["seq_id"] = 2


async def test_a_detail_with_a_nul_does_not_keep_a_session_open(world: World) -> None:
    session = await world.session()
    finish = {"reason": {"type": "errored"}, "detail": "a\0b"}
    assert (await world.post(f"sessions/{session}/finish", finish)).status_code == 200
    found = await world.ok("sessions/search", {"session_id": session})
    assert found["sessions"][0]["status"]["detail"] == r"a\0b"
