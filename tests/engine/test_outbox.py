"""Results reach the store once it can take them, each once, and the API hears of them."""

import asyncio
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from sqlalchemy import Connection, select, text
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus
from skyrl_tinker.domain.values import Failure, Usage
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.outbox import Outbox, failure_of, json_answer
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import DiskFullError, StateLostError, StatementError, UserError
from skyrl_tinker.store import server_state, stability_records
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.database.sqlite_database import WalCheckpointer
from skyrl_tinker.store.database.tables import Result
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import outcomes, queue
from skyrl_tinker.store.futures.finish import FutureOutcome, FutureResult
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.stability_records import SequenceRecord
from skyrl_tinker.store.store import Store
from tests.engine.support import journal, recorded
from tests.support.failures import failing_first
from tests.support.reads import reading
from tests.support.sqlite_file import new_file
from tests.support.waiting import until

RESULT = json_answer({"type": "create_model"})
REFUSED = Failure("rank: found 0, expected at least 1", "user")


def disk_error() -> OperationalError:
    return OperationalError("UPDATE", None, OSError("disk I/O error"))


class Commits:
    """Commits that were tried, by the ids of their futures. `failures`: of the next ones."""

    def __init__(self) -> None:
        self.tried: list[set[int]] = []
        self.failures: list[Exception] = []
        self._finish_all = outbox.finish_all

    def finish_all(self, conn: Connection, finished: Mapping[int, FutureOutcome], *how: Any) -> None:
        self.tried.append(set(finished))
        self._finish_all(conn, finished, *how)
        if self.failures:
            raise self.failures.pop()


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    commits = Commits()
    monkeypatch.setattr(outbox, "finish_all", commits.finish_all)
    monkeypatch.setattr(outbox, "RETRY_S", 0.0)
    return commits


async def waiting(store: Store, count: int = 1) -> list[QueuedRow]:
    session = await journal.new_session(store)
    for number in range(count):
        await journal.submit_create(store, session, number)
    return await store.read(lambda conn: list(queue.queued_after(conn, 0)))


def outcome(store: Store, row: QueuedRow) -> Outcome:
    with reading(store) as conn:
        found = outcomes.find(conn, row.request_id)
    assert found is not None
    return found


def put(conn: Connection) -> None:
    server_state.put(conn, "k", 1)


def value(store: Store) -> object:
    with reading(store) as conn:
        return server_state.get(conn, "k")


@pytest.mark.parametrize("also", [(), (put,)])
async def test_a_result_waits_for_a_database_that_fails_for_a_moment(
    store: Store, sender: Outbox, commits: Commits, rung: list[str], also: tuple[Op[None], ...]
) -> None:
    (row,) = await waiting(store)
    commits.failures = [disk_error(), disk_error()]
    await sender.send([(row.id, RESULT)], *also)
    assert commits.tried == [{row.id}] * 3
    assert (outcome(store, row).status, outcome(store, row).body) == (FutureStatus.DONE, RESULT.body)
    assert value(store) == (1 if also else None)
    assert rung == ["api"]


async def test_a_large_result_counts_in_the_log_as_what_it_is(
    store: Store, sender: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(WalCheckpointer, "note", lambda _, size: noted.append(size))
    (row,) = await waiting(store)
    await sender.send([(row.id, FutureResult("t", bytes(5_000_000)))])
    assert noted[-1] == 5_000_000


async def test_the_api_is_rung_when_a_result_is_on_disk(store: Store, tmp_path: Path) -> None:
    seen: list[tuple[str, object]] = []

    def ring(role: str) -> None:
        with closing(sqlite3.connect(tmp_path / "store.db")) as reader:
            seen.append((role, reader.execute("SELECT status FROM futures").fetchall()))

    (row,) = await waiting(store)
    await Outbox(store, cast(Doorbell, SimpleNamespace(ring=ring)), Metrics()).send([(row.id, RESULT)])
    assert seen == [("api", [("done",)])]


async def test_a_bell_that_cannot_ring_costs_nobody_a_result(store: Store) -> None:
    ring = Mock(side_effect=OSError("no buffer space available"))
    (row,) = await waiting(store)
    await Outbox(store, cast(Doorbell, SimpleNamespace(ring=ring)), Metrics()).send([(row.id, RESULT)])
    assert outcome(store, row).status is FutureStatus.DONE


async def test_a_result_is_kept_with_its_type_and_tokens(store: Store, sender: Outbox) -> None:
    (row,) = await waiting(store)
    await sender.send([(row.id, FutureResult("text/plain", b"x", usage=Usage(5, 2, 3)))])
    tokens = (Result.input_tokens, Result.cached_tokens, Result.output_tokens)
    with reading(store) as conn:
        assert tuple(conn.execute(select(Result.content_type, Result.body, *tokens)).one()) == (
            "text/plain",
            b"x",
            5,
            2,
            3,
        )


async def test_results_that_come_together_share_a_commit_and_a_ring(
    store: Store, sender: Outbox, commits: Commits, rung: list[str]
) -> None:
    *together, later = await waiting(store, 4)
    await asyncio.gather(*(sender.send([(row.id, RESULT)]) for row in together))
    await sender.send([])
    await sender.send([(later.id, RESULT)])
    assert commits.tried == [{row.id for row in together}, {later.id}]
    assert rung == ["api", "api"]


async def test_a_result_waits_for_no_others_than_those_of_its_turn_of_the_loop(
    store: Store, sender: Outbox
) -> None:
    (row,) = await waiting(store)
    sending = asyncio.create_task(sender.send([(row.id, RESULT)]))
    for _ in range(2):
        await asyncio.sleep(0)
    assert len(store._writer._queue) == 1
    await sending


async def test_a_caller_who_is_cancelled_takes_back_nobody_s_result(store: Store, sender: Outbox) -> None:
    """Not even its own one: it is the task of a sample that ends while others do."""
    rows = await waiting(store, 2)
    gone, other = (asyncio.create_task(sender.send([(row.id, RESULT)])) for row in rows)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone, other])
    assert (gone.cancelled(), other.cancelled()) == (True, False)
    assert [outcome(store, row).status for row in rows] == [FutureStatus.DONE] * 2


async def test_what_the_store_refuses_is_raised_to_its_own_caller_and_ends_no_later_one(
    store: Store, sender: Outbox, commits: Commits, rung: list[str]
) -> None:
    rows = await waiting(store, 2)
    commits.failures = [ValueError("too large")] * 2  # together, then the first by itself
    sending = [sender.send([(row.id, RESULT)]) for row in rows]
    raised = await asyncio.gather(*sending, return_exceptions=True)
    assert [str(error) for error in raised] == ["too large", "None"]
    assert [outcome(store, row).status for row in rows] == [FutureStatus.PENDING, FutureStatus.DONE]
    assert rung == ["api"]
    await sender.send([(rows[0].id, RESULT)])
    assert outcome(store, rows[0]).status is FutureStatus.DONE


async def test_results_and_what_goes_with_them_are_committed_all_or_not_at_all(
    store: Store, sender: Outbox, commits: Commits, rung: list[str]
) -> None:
    (row,) = await waiting(store)
    with pytest.raises(UserError):
        await sender.send([(row.id, RESULT)], put, Mock(side_effect=UserError("no")))
    commits.failures = [ValueError("too large")]
    with pytest.raises(ValueError, match="too large"):
        await sender.send([(row.id, RESULT)], put)
    assert (outcome(store, row).status, value(store), rung) == (FutureStatus.PENDING, None, [])


async def test_a_result_that_comes_too_late_changes_nothing(
    store: Store, sender: Outbox, metrics: Metrics
) -> None:
    """Also the sequences that it would record are not there: their request has failed."""
    accepted = await recorded.submit_sample(store, await journal.new_session(store))
    (row,) = await store.read(lambda conn: queue.queued_after(conn, 0))
    metrics.arrived([row])
    await sender.send([(row.id, REFUSED)])
    first = outcome(store, row)
    record = SequenceRecord(accepted.sequence_ids[0], np.ones(2, np.int32), np.zeros(2, np.float32), 3)
    await sender.send([(row.id, FutureResult("text/plain", b"late", (record,)))])
    assert outcome(store, row) == first
    assert first.status is FutureStatus.FAILED
    with reading(store) as conn:
        assert stability_records.find(conn, accepted.sequence_ids) == {}
    assert b'requests_total{kind="sample",outcome="user"} 1.0' in metrics.text()
    assert b'outcome="ok"' not in metrics.text()


async def test_only_what_replay_needs_keeps_its_body(store: Store, sender: Outbox) -> None:
    rows = await waiting(store, 4)
    results = zip((row.id for row in rows), [RESULT, REFUSED] * 2, strict=True)
    await sender.send(results, replayed={row.id for row in rows[:2]})
    with reading(store) as conn:
        kept = queue.read_bodies(conn, [row.id for row in rows], ended=True)
    assert kept.keys() == {row.id for row in rows[:2]}


async def test_a_request_counts_as_answered_once_its_result_is_committed(
    store: Store, sender: Outbox, commits: Commits, metrics: Metrics
) -> None:
    rows = await waiting(store, 3)
    metrics.arrived(rows)
    results = [(rows[0].id, RESULT), (rows[1].id, REFUSED)]
    commits.failures = [ValueError("too large")] * 2
    with pytest.raises(ValueError, match="too large"):
        await sender.send(results)
    assert list(metrics.pending()) == rows
    await sender.send(results)
    sender.note_answered([rows[2].id])
    assert list(metrics.pending()) == []
    for label, count in (("ok", 2), ("user", 1)):
        assert f'kind="create_model",outcome="{label}"}} {count}.0' in metrics.text().decode()


async def test_a_result_that_waits_for_its_commit_when_the_store_closes_is_on_disk(
    tmp_path: Path, bell: Doorbell
) -> None:
    """Although its sender is cancelled, as all work of an engine is that stops."""
    begun, let_go = threading.Event(), threading.Event()

    def slow(conn: Connection) -> None:
        begun.set()
        let_go.wait()

    url = new_file(tmp_path / "closed.db")
    store = Store.open(url)
    (row,) = await waiting(store)
    writing = asyncio.create_task(store.write(slow))
    await asyncio.to_thread(begun.wait)
    sending = asyncio.create_task(Outbox(store, bell, Metrics()).send([(row.id, RESULT)]))
    await until(lambda: len(store._writer._queue))
    sending.cancel()
    bell.close()
    ending = asyncio.create_task(store.close())
    let_go.set()
    await asyncio.gather(writing, ending)
    again = Store.open(url)
    assert outcome(again, row).status is FutureStatus.DONE
    await again.close()


async def test_a_read_waits_for_a_database_that_fails_for_a_moment(store: Store, commits: Commits) -> None:
    read = failing_first(partial(server_state.get, key="k"), [UserError("no"), disk_error()])
    with pytest.raises(UserError):
        await outbox.persistently(store.read, read)
    await store.write(put)
    assert await outbox.persistently(store.read, read) == 1


async def test_a_statement_that_fails_each_time_is_named(store: Store, commits: Commits) -> None:
    read = Mock(side_effect=lambda conn: conn.execute(text("SELECT * FROM no_such")))
    with pytest.raises(StatementError, match=r"3 times \(no such table: no_such\): SELECT \* FROM no_such"):
        await outbox.persistently(store.read, read)
    assert read.call_count == outbox.STATEMENT_TRIES


async def test_what_was_acknowledged_waits_for_room_on_the_disk(commits: Commits) -> None:
    failures = [UserError("no"), DiskFullError("full"), DiskFullError("full")]
    work = failing_first(partial(asyncio.sleep, 0, "written"), failures)
    with pytest.raises(UserError):
        await outbox.when_possible(work)
    assert await outbox.when_possible(work) == "written"


@pytest.mark.parametrize(
    ("error", "failure", "logged"),
    [
        (UserError("no"), Failure("no", "user"), False),
        (StateLostError("gone"), Failure("gone", "server"), False),
        (KeyError("x"), Failure("KeyError: 'x'", "server"), True),
    ],
)
def test_an_unexpected_error_is_the_server_s_and_logged(
    error: Exception, failure: Failure, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert failure_of(error) == failure
    assert bool(caplog.records) == logged


@pytest.mark.parametrize(
    "error", [StateLostError("gone from /srv/h/17"), UserError("/srv/h/17"), OSError(2, "no", "/srv/h/17")]
)
def test_clients_get_no_paths_of_the_server_and_the_log_has_them(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert "/srv" not in failure_of(error).message
    assert "…/17" in failure_of(error).message
    assert "/srv/h/17" in caplog.text


def test_an_unexpected_error_shows_no_secret() -> None:
    assert failure_of(ValueError("tml-" + 20 * "a")).message == "ValueError: [secret]"
