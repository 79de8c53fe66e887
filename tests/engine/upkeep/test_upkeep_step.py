"""Steps of the clean-up neither fail together nor wait long after a failure."""

import asyncio
import math
from unittest.mock import Mock

import pytest

from skyrl_tinker.config import Settings
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
    shrink = Mock(return_value=False)
    error = ValueError("an event that nobody can read")
    monkeypatch.setattr(row_purges, "purge_audit", Mock(side_effect=error))
    monkeypatch.setattr(slices, "shrink", shrink)
    assert not await Purge(store, Settings()).run_now()
    assert shrink.called
    assert "clean-up of the audit log failed" in caplog.text
    monkeypatch.undo()
    assert await Purge(store, Settings()).run_now()


async def test_nothing_goes_that_is_not_counted_yet(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    purge = Mock(return_value=[])
    monkeypatch.setattr(session_purges, "ended_sessions", purge)
    with pytest.MonkeyPatch.context() as failing:
        error = ValueError("a result that nobody can read")
        failing.setattr(usage_records, "roll_up", Mock(side_effect=error))
        assert not await Purge(store, Settings()).run_now()
    assert not purge.called
    assert await Purge(store, Settings()).run_now()
    assert purge.call_count == 1
