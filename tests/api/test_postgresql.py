"""The API on PostgreSQL, where that is not as on SQLite."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker.store import session_records
from tests.api.support.metadata import check_search
from tests.api.support.passes import old_json
from tests.api.support.waiting import ready_model, submit, waiting
from tests.api.support.world import STEP, World, running, sample, settings_for, step
from tests.support.postgres import Postgres


@pytest.fixture
async def world(postgres: Postgres, tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "home").mkdir()
    async with running(settings_for(tmp_path / "home", database_url=postgres.new_database())) as made:
        yield made


@pytest.mark.parametrize("name", ["display_name", "project_id"])
async def test_text_that_it_cannot_store_is_refused_and_harms_no_other(world: World, name: str) -> None:
    wrong = {"sdk_version": "0.38.0", "tags": ["a\0b"], name: "a\0b"}
    answer = await world.post("create_session", wrong)
    assert (answer.status_code, "NUL" in answer.json()["detail"]) == (400, True)
    session = await world.session()
    found = await world.http.get("sessions")
    assert found.json()["sessions"] == [session]


async def test_a_path_with_nul_leads_nowhere(world: World) -> None:
    for path in ("training_runs/%00", "sessions/a%00", "console/requests/%00/tokens"):
        answer = await world.http.get(path)
        assert (answer.status_code, "NUL" in answer.json()["detail"]) == (404, True)


async def test_metadata_of_any_kind_is_found_in_its_displayed_form(world: World) -> None:
    await check_search(world)


async def test_a_session_with_a_nul_of_an_older_server_is_left_out_of_searches(world: World) -> None:
    old: dict[str, Any] = {"sdk_version": "0.38.0", "user_metadata": {"key": "a\0b"}}
    await world.store.write(lambda conn: session_records.create(conn, owner=None, **old))
    opened = {"sdk_version": "0.38.0", "user_metadata": {"key": "a"}}
    session = (await world.ok("create_session", opened))["session_id"]
    found = await world.ok("sessions/search", {"user_metadata": {"key": "a"}})
    assert [each["session_id"] for each in found["sessions"]] == [session]


async def test_a_failure_that_quotes_a_nul_reaches_the_client(world: World) -> None:
    """Raised anywhere, also where a request is accepted as failed because its seq_id is used."""
    model = await world.model()
    wrong = old_json(model, 1)
    wrong["forward_backward_input"]["data"][0]["model_input"]["chunks"] = [{"type": "a\0b"}]
    refused = (await world.ok("forward_backward", wrong))["request_id"]
    assert r"is of kind a\0b, expected encoded_text" in await world.failure(refused)
    accepted = (await world.ok("optim_step", step(model, 2)))["request_id"]
    await world.fail(accepted, "a\0b")
    assert (await world.result(accepted)).json()["error"] == r"a\0b"


async def test_a_model_trains_is_told_what_was_refused_and_ends(postgres: Postgres, tmp_path: Path) -> None:
    """All reads of the engine go through threads here, with others' work in between."""
    (tmp_path / "home").mkdir()
    settings = settings_for(
        tmp_path / "home", database_url=postgres.new_database(), timeouts={"long_poll_s": 10.0}
    )
    async with waiting(settings) as made:
        made.samplers.go_on.set()
        models = [await ready_model(made.api) for _ in range(2)]
        for model in models:
            wrong = old_json(model, 2)
            wrong["forward_backward_input"]["data"][0]["model_input"]["chunks"][0]["tokens"] = [5, 10**6]
            ids = [
                await submit(made.api, path, body)
                for path, body in [
                    ("forward_backward", wrong),
                    ("optim_step", step(model, 3)),
                    ("forward_backward", old_json(model, 1)),
                    ("optim_step", step(model, 4)),
                    ("unload_model", {"model_id": model, "type": "unload_model"}),
                ]
            ]
            assert "the gradients of its window are cleared" in await made.api.failure(ids[1])
            assert (await made.api.result(ids[3])).json()["metrics"] == STEP["metrics"]
            assert (await made.api.result(ids[4])).json()["model_id"] == model
            late = await submit(made.api, "optim_step", step(model, 5))
            assert "was unloaded" in await made.api.failure(late)
        sampler = await made.api.sampler()
        for request_id in [
            await submit(made.api, "asample", sample(sampler, number)) for number in range(50)
        ]:
            assert (await made.api.result(request_id)).json()["sequences"]
