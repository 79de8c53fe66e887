"""Steps of the clean-up neither fail together nor wait long after a failure."""

import asyncio
import math

import pytest
from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.engine.upkeep import upkeep_step as steps
from skyrl_tinker.engine.upkeep.purge import Purge
from skyrl_tinker.engine.upkeep.upkeep_step import Step
from skyrl_tinker.errors import StorageError
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.retention import row_purges, session_purges, slices
from skyrl_tinker.store.store import Store
from tests.support.waiting import end, until


async def test_a_step_that_failed_is_tried_again_with_the_next_sweep_and_not_after_its_interval(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "SWEEP_S", 0.001)
    ends = iter([StorageError("no route to host"), False, ValueError("unforeseen"), None])
    ended = []

    async def run() -> bool | None:
        ended.append(end := next(ends))
        if isinstance(end, Exception):
            raise end
        return end

    repeating = asyncio.create_task(Step("files of dead hosts", run, every_s=math.inf).repeat())
    await until(lambda: len(ended) == 4)
    await end(repeating)
    assert "clean-up of files of dead hosts is tried again in 0 s: no route to host" in caplog.text
    assert "clean-up of files of dead hosts failed" in caplog.text


async def test_a_rule_that_fails_stops_none_behind_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shrunk = []

    def fail(conn: Connection, before: float) -> bool:
        raise ValueError("an event that nobody can read")

    def shrink(conn: Connection) -> bool:
        shrunk.append(conn)
        return False

    monkeypatch.setattr(row_purges, "purge_audit", fail)
    monkeypatch.setattr(slices, "shrink", shrink)
    assert not await Purge(store, Settings()).run_now()
    assert shrunk
    assert "clean-up of the audit log failed" in caplog.text
    monkeypatch.undo()
    assert await Purge(store, Settings()).run_now()


async def test_nothing_goes_that_is_not_counted_yet(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    purged = []

    def fail(conn: Connection, most: int) -> bool:
        raise ValueError("a result that nobody can read")

    def note(conn: Connection, finished_before: float) -> list[SessionId]:
        purged.append(finished_before)
        return []

    monkeypatch.setattr(session_purges, "ended_sessions", note)
    with pytest.MonkeyPatch.context() as failing:
        failing.setattr(usage_records, "roll_up", fail)
        assert not await Purge(store, Settings()).run_now()
    assert purged == []
    assert await Purge(store, Settings()).run_now()
    assert len(purged) == 1
