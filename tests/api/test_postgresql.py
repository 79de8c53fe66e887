"""The API on PostgreSQL, where that is not as on SQLite."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.support.world import World, running, settings_for
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
