"""Lists may be long: they hold neither the event loop nor much memory."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy import Engine, event

from skyrl_tinker.api.requests import responses
from skyrl_tinker.api.routes import session_list
from skyrl_tinker.domain.ids import CheckpointKind
from tests.api.support.streaming import stream
from tests.api.support.world import World

HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
HOURS = urlencode(
    {
        "starting_on": (HOUR - timedelta(hours=1)).isoformat(),
        "ending_before": (HOUR + timedelta(hours=3)).isoformat(),
    }
)


@pytest.fixture
def read() -> Iterator[list[tuple[str, int]]]:
    """Statements that are executed, and by which thread."""
    statements: list[tuple[str, int]] = []

    def executed(conn: Any, cursor: Any, statement: str, *others: Any) -> None:
        statements.append((statement, threading.get_ident()))

    event.listen(Engine, "before_cursor_execute", executed)
    yield statements
    event.remove(Engine, "before_cursor_execute", executed)


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("checkpoints", "checkpoints"),
        ("training_runs/{model}/checkpoints", "checkpoints"),
        ("training_runs?access_scope=accessible", "models"),
        ("audit", "audit_events"),
        (f"billing/usage/events?{HOURS}", "results"),
    ],
)
async def test_what_lists_is_read_in_a_thread(
    world: World, read: list[tuple[str, int]], path: str, table: str
) -> None:
    model = await world.model()
    await world.checkpoint(model, CheckpointKind.WEIGHTS, "a")
    read.clear()
    answer = await world.http.get(path.format(model=model))
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    assert off_the_loop(read, table)


async def test_sessions_are_searched_in_a_thread(world: World, read: list[tuple[str, int]]) -> None:
    session = await world.session()
    read.clear()
    found = await world.ok("sessions/search", {})
    assert [each["session_id"] for each in found["sessions"]] == [session]
    assert off_the_loop(read, "sessions")


@pytest.mark.parametrize(
    ("path", "field", "count"),
    [
        ("checkpoints?limit=1000", "checkpoints", 40),
        ("training_runs/{model}/checkpoints", "checkpoints", 21),
        ("training_runs?limit=1000", "training_runs", 20),
        (f"billing/usage/events?{HOURS}", "sessions", 20),
    ],
)
async def test_however_much_metadata_a_list_has_a_part_of_it_is_in_memory(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, field: str, count: int
) -> None:
    monkeypatch.setattr(responses, "AT_ONCE", 2)
    monkeypatch.setattr(responses, "PART_CHARACTERS", 100_000)
    metadata = {"notes": "\u00e9" * 30_000}
    opened = {"sdk_version": "0.38.0", "user_metadata": metadata}
    sessions = [(await world.ok("create_session", opened))["session_id"] for _ in range(20)]
    models = [await world.model(session, user_metadata=metadata) for session in sessions]
    for number, model in enumerate([*models, *[models[0]] * 20]):
        await world.checkpoint(model, CheckpointKind.WEIGHTS, f"c{number}", user_metadata=metadata)
    pieces = await stream(world, f"http://api/api/v1/{path.format(model=models[0])}")
    body = b"".join(pieces)
    items = json.loads(body)[field]
    found = items.values() if isinstance(items, dict) else items
    assert [each["user_metadata"] for each in found] == [metadata] * count
    assert max(map(len, pieces)) < len(body) / 3


async def test_a_page_of_a_search_ends_where_its_metadata_is_long(world: World) -> None:
    opened = {"sdk_version": "0.38.0", "user_metadata": {"notes": "x" * 1000}}
    made = [(await world.ok("create_session", opened))["session_id"] for _ in range(7)]
    world.patch.setattr(session_list, "_PAGE_CHARACTERS", 2500)
    found, cursor = list[str](), None
    while True:
        page = await world.ok("sessions/search", {"cursor": cursor, "limit": 4})
        assert len(page["sessions"]) == min(3, 7 - len(found))
        found += [each["session_id"] for each in page["sessions"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert found == made[::-1]


def off_the_loop(read: list[tuple[str, int]], table: str) -> bool:
    threads = {thread for statement, thread in read if f"FROM {table}" in statement}
    return bool(threads) and threading.get_ident() not in threads
