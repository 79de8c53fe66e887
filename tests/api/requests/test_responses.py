"""Lists may be long: what reads and writes them does not hold the event loop."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy import Engine, event

from skyrl_tinker.domain.ids import CheckpointKind
from tests.api.support.world import World

HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
HOURS = urlencode(
    {"starting_on": HOUR.replace(hour=0).isoformat(), "ending_before": HOUR.replace(hour=23).isoformat()}
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


def off_the_loop(read: list[tuple[str, int]], table: str) -> bool:
    threads = {thread for statement, thread in read if f"FROM {table}" in statement}
    return bool(threads) and threading.get_ident() not in threads
