"""Results reach the store once it can take them."""

from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.outbox import Outbox, json_answer
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import finish as future_finish
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.store import Store
from tests.engine.support import journal


async def test_a_result_waits_for_a_database_that_fails_for_a_moment(
    store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = await journal.submit_create(store, await journal.new_session(store))
    with store.read() as conn:
        (row,) = queue.queued_after(conn, 0)
    finish, failures = future_finish.succeed_all, [OperationalError("UPDATE", None, OSError("disk full"))]

    def succeed_all(conn: Connection, *arguments: Any) -> list[int]:
        if failures:
            raise failures.pop()
        return finish(conn, *arguments)

    monkeypatch.setattr(future_finish, "succeed_all", succeed_all)
    monkeypatch.setattr(outbox, "RETRY_S", 0.01)
    await Outbox(store, bell, Metrics()).send([(row.id, json_answer({}))])
    assert failures == []
    assert (await journal.outcome(store, accepted)).status is FutureStatus.DONE
