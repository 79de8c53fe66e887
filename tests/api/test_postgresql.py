"""The API on PostgreSQL, where that is not as on SQLite."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker.store import session_records
from tests.api.support.passes import old_json
from tests.api.support.world import World, running, settings_for, step
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


async def test_metadata_of_any_kind_is_found_in_its_displayed_form(world: World) -> None:
    metadata = {"text": "a b", "number": 1.5, "true": True, "null": None, "list": [1, "x"]}
    opened = {"sdk_version": "0.38.0", "user_metadata": metadata}
    session = (await world.ok("create_session", opened))["session_id"]
    await world.session()
    shown = {"text": "a b", "number": "1.5", "true": "true", "null": "null", "list": '[1,"x"]'}
    for key, value in shown.items():
        found = await world.ok("sessions/search", {"user_metadata": {key: value}, "limit": 5})
        assert [each["session_id"] for each in found["sessions"]] == [session], key


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
