"""Units are committed in the order in which they ran; one that cannot be committed ends the engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import Effect, FutureStatus, RequestKind
from skyrl_tinker.engine import outbox, unit_commits
from skyrl_tinker.engine.outbox import Outbox, json_answer
from skyrl_tinker.engine.recovery.snapshot_keeper import _require_written
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.unit_commits import UnitCommits, UnitEnd
from skyrl_tinker.errors import SkyrlTinkerError, UserError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.support.failures import failing_first
from tests.support.reads import reading
from tests.support.waiting import end

WRITTEN = "units written"


@pytest.fixture
async def commits(sender: Outbox) -> AsyncIterator[UnitCommits]:
    made = UnitCommits(sender)
    running = asyncio.create_task(made.run())
    yield made
    await end(running)


def write(number: int) -> Callable[[Connection], None]:
    def op(conn: Connection) -> None:
        server_state.put(conn, WRITTEN, [*(server_state.get(conn, WRITTEN) or []), number])

    return op


def ended(number: int) -> UnitEnd:
    return UnitEnd({}, (write(number),))


def failing(error: Exception) -> UnitEnd:
    def op(conn: Connection) -> None:
        raise error

    return UnitEnd({}, (op,))


def written(store: Store) -> object:
    with reading(store) as conn:
        return server_state.get(conn, WRITTEN)


async def test_a_unit_is_committed_behind_those_before_it_however_long_these_are_encoded(
    store: Store, commits: UnitCommits
) -> None:
    encoded = [asyncio.get_running_loop().create_future() for _ in range(3)]
    committed = [commits.add(each) for each in encoded]
    for number in (2, 0):
        encoded[number].set_result(ended(number))
    await committed[0]
    assert (written(store), committed[2].done()) == ([0], False)
    encoded[1].set_result(ended(1))
    await commits.drain()
    assert written(store) == [0, 1, 2]
    await commits.add(ended(3))
    assert written(store) == [0, 1, 2, 3]


async def test_a_database_that_fails_for_a_moment_changes_no_order(
    store: Store, commits: UnitCommits, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OperationalError("UPDATE", None, OSError("disk I/O error"))]
    op = failing_first(lambda _: None, failures)
    monkeypatch.setattr(outbox, "RETRY_S", 0.0)
    for each in (ended(0), UnitEnd({}, (op,)), ended(1)):
        committed = commits.add(each)
    await committed
    assert (failures, written(store)) == ([], [0, 1])


async def test_what_is_no_unit_and_cannot_be_committed_keeps_no_other_back(
    store: Store, commits: UnitCommits
) -> None:
    ends = [ended(0), failing(UserError("no")), ended(1)]
    raised = await asyncio.gather(*map(commits.add, ends), return_exceptions=True)
    assert [str(error) if error else None for error in raised] == [None, "no", None]
    assert written(store) == [0, 1]


async def _not_encoded() -> UnitEnd:
    raise ValueError("a bug")


@pytest.mark.parametrize(
    "make", [lambda: replace(failing(ValueError("a bug")), unit=7), _not_encoded], ids=["written", "encoded"]
)
async def test_no_unit_is_committed_behind_one_that_cannot_be(
    store: Store, metrics: Metrics, make: Callable[[], UnitEnd | Awaitable[UnitEnd]]
) -> None:
    commits = UnitCommits(Outbox(store, cast(Doorbell, SimpleNamespace(ring=lambda _: None)), metrics))
    committed = [commits.add(each) for each in (ended(0), make(), ended(2))]
    running = asyncio.create_task(commits.run())
    await asyncio.wait([running, committed[2]], return_when=asyncio.FIRST_COMPLETED)
    assert [each.done() for each in committed] == [True, True, False]
    assert str(committed[1].exception()) == str(running.exception()) == "a bug"
    assert written(store) == [0]


async def test_units_that_wait_share_transactions_of_a_bounded_size(
    commits: UnitCommits, rung: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_commits, "MOST", 2)
    for number in range(5):
        commits.add(ended(number))
    await commits.drain()
    assert rung == ["api"] * 3


async def test_a_snapshot_waits_for_a_save_before_it_that_ended_its_turn_in_the_same_commit(
    store: Store, commits: UnitCommits
) -> None:
    """All wait for one that is encoded; the save has run, and is still being written."""
    model = await journal.ready_model(store)
    key = await journal.key_of(store, model)
    accepted = await journal.submit(store, model, 1, RequestKind.SAVE_WEIGHTS)
    save = (await journal.outcome(store, accepted)).future_id
    encoded: asyncio.Future[UnitEnd] = asyncio.get_running_loop().create_future()
    commits.add(encoded)
    commits.add(UnitEnd({}, (), 1, {save: None}))
    snapshot = commits.add(UnitEnd({}, (partial(_require_written, model=key, until=1),)))
    encoded.set_result(UnitEnd({}))
    with pytest.raises(SkyrlTinkerError, match="still being written"):
        await snapshot


async def test_a_unit_is_recorded_with_its_answers_and_the_bodies_that_replay_needs(
    store: Store, commits: UnitCommits, metrics: Metrics
) -> None:
    session = await journal.new_session(store)
    accepted = await journal.submit_create(store, session)
    assert accepted.model_id is not None
    await journal.submit_pass(store, accepted.model_id, 1)
    await journal.submit_pass(store, accepted.model_id, 2, forward_only=True)
    created, backward, forward = await store.read(lambda conn: queue.queued_after(conn, 0))
    metrics.arrived([created, backward, forward])
    answers = {row.id: json_answer({}) for row in (backward, forward)}
    effects = {created.id: None, backward.id: Effect.GRADIENTS, forward.id: None}
    await commits.add(UnitEnd(answers, (), 7, effects, 2048, answered=(created.id,)))
    with reading(store) as conn:
        assert created.model_key is not None
        ran = unit_records.ran_after(conn, created.model_key, 0)
        next_seq = unit_records.next_seq(conn, created.model_key)
        bodies = queue.read_bodies(conn, [backward.id, forward.id], ended=True)
    assert [(each.row.status, each.unit, each.effect, each.row_budget) for each in ran] == [
        (FutureStatus.DONE, 7, Effect.GRADIENTS, 2048)
    ], "a forward has nothing to repeat"
    assert next_seq == 3
    assert bodies.keys() == {backward.id}
    assert list(metrics.pending()) == []
