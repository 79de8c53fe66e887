"""How SQLite goes about what is asked of a large journal: along indexes, never through all of it."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import (
    ALL_OWNERS,
    ModelKey,
    OwnerId,
    RequestId,
    SamplingSessionId,
    SessionId,
    VersionId,
)
from skyrl_tinker.domain.values import Failure, Usage
from skyrl_tinker.protocol.schemas.console import ReadableQuery
from skyrl_tinker.store import checkpoint_records, session_records, usage_records, weight_versions
from skyrl_tinker.store.console import readable_requests, run_reports, step_points
from skyrl_tinker.store.console.pending import pending_groups
from skyrl_tinker.store.console.traced_requests import finished_requests, requests_after
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.tables import Base, Future
from skyrl_tinker.store.futures import cancellation, completions, finish, outcomes, queue
from skyrl_tinker.store.futures.sample_submission import NewSample, submit_sample
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.reports import holdings, training_runs
from skyrl_tinker.store.retention import row_purges, session_purges
from skyrl_tinker.store.session_records import Beat
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_sqlite
from tests.store.support.rows import base_sampler, finish_session, new_session, outcome, queued, sample
from tests.support.reads import reading

pytestmark = on_sqlite

OWNER = OwnerId(1)
MODEL = ModelKey(1)
SAMPLER = SamplingSessionId("s:sample:0")
USAGE = weight_versions.EphemeralUsage(MODEL, 5, 2, VersionId(5), 1, ended=True)
Query = Callable[[Connection], Any]

QUERIES: dict[str, Query] = {
    "new requests": lambda conn: queue.queued_after(conn, 1),
    "finished requests for traces": lambda conn: finished_requests(conn, 1, 10),
    "new results": lambda conn: outcomes.finished_after(conn, 1),
    "the end of a request": lambda conn: finish.fail(conn, 1, Failure("no", "server")),
    "outcome": lambda conn: outcomes.find(conn, RequestId("r")),
    "place": lambda conn: cancellation.queue_position(conn, RequestId("r")),
    "completions, near": lambda conn: completions.finished_since(conn, SAMPLER, 0, 0),
    "completions, far": lambda conn: completions.finished_since(conn, SAMPLER, 0, -completions.NEAR - 1),
    "slices of a model": lambda conn: requests_after(conn, Future.model_key == 1, 0, 10),
    "slices of a sampler": lambda conn: requests_after(conn, Future.sampling_session_id == "s", 0, 10),
    "usage": lambda conn: usage_records.hourly_between(conn, OWNER, 0, 10),
    "roll-up": lambda conn: usage_records.roll_up(conn, 10),
    "pending requests by session": pending_groups,
    "where an engine begins": lambda conn: queue.before_waiting(conn, {MODEL: 1}),
    "a pending model": lambda conn: queue.pending_of(conn, MODEL),
    "what a model ran": lambda conn: unit_records.ran_after(conn, MODEL, 1),
    "where a model stopped": lambda conn: unit_records.next_seq(conn, MODEL),
    "a poisoned window": lambda conn: unit_records.window_error(conn, MODEL),
    "saves on their way": lambda conn: unit_records.unfinished_until(conn, MODEL, 1),
    "bodies that a snapshot covers": lambda conn: unit_records.drop_bodies(conn, MODEL, 1),
    "bodies of forwards": lambda conn: unit_records.drop_bodies(conn, MODEL, 0, 7),
    "models with bodies": unit_records.models_with_bodies,
    "waiting requests of keys": holdings.pending_requests,
    "purge of results": lambda conn: row_purges.purge_results(conn, time.time()),
    "purge of what a model ran": lambda conn: row_purges.purge_training(conn, MODEL, 9, time.time()),
    "purge of dropped weights": lambda conn: row_purges.purge_versions(conn, time.time()),
    "purge of samples": lambda conn: row_purges.purge_samples(conn, time.time()),
    "sessions to clear": lambda conn: session_purges.ended_sessions(conn, time.time()),
    "sessions to forget": lambda conn: session_purges.forgettable_sessions(conn, time.time()),
    "clearing a session": lambda conn: session_purges.clear_session(conn, SessionId("s")),
    "forgetting a session": lambda conn: session_purges.forget_session(conn, SessionId("s")),
    "weights that are waited for": weight_versions.list_awaited_versions,
    "sessions to end": lambda conn: session_records.list_expired(conn, time.time(), 600.0, 1e7),
}


async def statements_of(store: Store, query: Query) -> list[str]:
    """What is executed, with its parameters filled in."""
    executed: list[str] = []

    def op(conn: Connection) -> None:
        sqlite.raw(conn).set_trace_callback(executed.append)
        try:
            query(conn)
        finally:
            sqlite.raw(conn).set_trace_callback(None)

    await store.write(op)
    return executed


async def plan_of(store: Store, statement: str) -> list[str]:
    with reading(store) as conn:
        return [row[3] for row in sqlite.raw(conn).execute(f"EXPLAIN QUERY PLAN {statement}")]


@pytest.mark.parametrize("name", QUERIES)
async def test_no_query_goes_through_all_futures(store: Store, sampler: SamplingSessionId, name: str) -> None:
    for number in range(3):
        await used(store, sampler, number)
    executed = await statements_of(store, QUERIES[name])
    plans = [line for statement in executed for line in await plan_of(store, statement)]
    assert any("futures" in line for line in plans)
    scans = [line for line in plans if line.startswith("SCAN futures")]
    assert not [line for line in scans if "ix_futures_pending" not in line], "that one has pending ones only"


SWEEPS: dict[str, Query] = {
    "silent sessions": lambda conn: session_records.list_expired(conn, time.time(), 60.0, 1e7),
    "deleted checkpoints": lambda conn: checkpoint_records.list_garbage(conn, time.time()),
    "purge of dropped weights": lambda conn: row_purges.purge_versions(conn, time.time()),
    "purge of stability": lambda conn: row_purges.purge_stability(conn, time.time()),
    "purge of audit": lambda conn: row_purges.purge_audit(conn, time.time()),
    "purge of usage": lambda conn: row_purges.purge_usage(conn, time.time()),
    "purge of points": lambda conn: row_purges.purge_points(conn, time.time()),
    "points of a run": lambda conn: step_points.points_after(conn, MODEL, 1, 10),
    "reports of a run": lambda conn: run_reports.reports_after(conn, MODEL, 1, 10),
    "rewards of a run": lambda conn: run_reports.reports_after(conn, MODEL, 1, 10, reward_only=True),
    "tokens of a run": lambda conn: readable_requests.readable_requests(conn, OWNER, ReadableQuery(run="r")),
    "tokens of all": lambda conn: readable_requests.readable_requests(conn, OWNER, ReadableQuery()),
    "runs": lambda conn: training_runs.runs_of(conn, ALL_OWNERS, [MODEL]),
    "last points": lambda conn: step_points.last_points(conn, [MODEL]),
    "purge of checkpoints": lambda conn: row_purges.purge_removed_checkpoints(conn, time.time()),
    "clearing a session": lambda conn: session_purges.clear_session(conn, SessionId("s")),
    "forgetting a session": lambda conn: session_purges.forget_session(conn, SessionId("s")),
    "sessions to clear": lambda conn: session_purges.ended_sessions(conn, time.time()),
    "sessions to forget": lambda conn: session_purges.forgettable_sessions(conn, time.time()),
}


@pytest.mark.parametrize("name", SWEEPS)
async def test_no_sweep_goes_through_a_whole_table(store: Store, name: str) -> None:
    executed = await statements_of(store, SWEEPS[name])
    plans = [line for statement in executed for line in await plan_of(store, statement)]
    assert plans
    scans = [line for line in plans if line.startswith("SCAN") and line.split()[1] in Base.metadata.tables]
    assert not [line for line in scans if "ix_futures_pending" not in line]


@pytest.mark.parametrize(
    "query",
    [
        weight_versions.ephemeral_usage,
        lambda conn: weight_versions.list_droppable_versions(conn, [USAGE]),
        lambda conn: weight_versions.list_surplus_versions(conn, [USAGE], 2),
        lambda conn: weight_versions.list_surplus_versions(conn, [USAGE], 2, created_before=0.0),
    ],
)
async def test_sweeps_look_at_kept_versions_by_their_index_and_at_no_others(
    store: Store, query: Query
) -> None:
    executed = await statements_of(store, query)
    plans = [line for statement in executed for line in await plan_of(store, statement)]
    read = [line for line in plans if "adapter_versions" in line]
    assert read
    by_index = "ix_adapter_versions_kept", "ix_adapter_versions_model_key", "INTEGER PRIMARY KEY"
    assert all(line.startswith("SEARCH") and any(each in line for each in by_index) for line in read)


async def test_kept_versions_that_all_stay_are_read_once(store: Store) -> None:
    stay = USAGE._replace(inflight=1, ended=False)
    for query in (
        lambda conn: weight_versions.list_droppable_versions(conn, [stay]),
        lambda conn: weight_versions.list_surplus_versions(conn, [stay], stay.versions),
    ):
        assert await statements_of(store, query) == []


async def test_rolling_up_takes_as_many_statements_for_many_sessions_as_for_one(store: Store) -> None:
    async def counted(sessions: int) -> int:
        for _ in range(sessions):
            await used(store, await base_sampler(store, await new_session(store)))
        return len(await statements_of(store, usage_records.roll_up))

    await counted(1)  # the first also makes the note of how far it came
    assert await counted(1) == await counted(20)


async def test_the_results_of_others_cost_a_client_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand clients that poll each second, or each result would be read a thousand times."""
    monkeypatch.setattr(completions, "FEW", 2)
    mine, other = [await base_sampler(store, await new_session(store)) for _ in range(2)]
    steps: list[int] = []

    async def counted(more: int) -> int:
        for _ in range(more):
            await used(store, other, next(numbers))
        with reading(store) as conn:
            steps.clear()
            sqlite.raw(conn).set_progress_handler(lambda: steps.append(1), 1)
            found, _ = completions.finished_since(conn, mine, 0, 0)
            sqlite.raw(conn).set_progress_handler(None, 1)
        assert [each.cursor for each in found] == [1]
        return len(steps)

    numbers = itertools.count()
    await used(store, mine)
    assert await counted(3) == await counted(20)


async def test_a_sample_is_accepted_in_two_statements_and_finished_in_three(
    store: Store, sampler: SamplingSessionId
) -> None:
    """A row and its body, which later goes by itself; the row, its result, the body."""
    new = NewSample(sampler, 0, b"digest", b"sample", 1, 1, 1)
    accepted = await statements_of(store, lambda conn: submit_sample(conn, new, None).value())
    assert len(accepted) == 2
    (row,) = await queued(store)
    assert len(await statements_of(store, lambda conn: finish.succeed(conn, row.id, "t", b"result"))) == 3


async def test_heartbeats_of_finished_sessions_take_as_many_statements_as_one(store: Store) -> None:
    """Of clients that go on: all others wait for this transaction."""
    counts = []
    for sessions in (1, 20):
        over = [await new_session(store) for _ in range(sessions)]
        for session in over:
            await finish_session(store, session)
        beats: list[Beat] = [(None, session) for session in (*over, SessionId("nobody"))]
        executed = await statements_of(store, partial(session_records.heartbeat, beats=beats))
        counts.append(len(executed))
    assert counts[0] == counts[1] == 2


async def test_heartbeats_cost_the_same_however_many_sessions_are_live(store: Store) -> None:
    """SQLite tends to go through all that are live, along the index by which silent ones are found."""
    beats: list[Beat] = [(None, await new_session(store)) for _ in range(30)]
    steps: list[int] = []

    def op(conn: Connection) -> None:
        sqlite.raw(conn).set_progress_handler(lambda: steps.append(1), 1)
        session_records.heartbeat(conn, beats)
        sqlite.raw(conn).set_progress_handler(None, 1)

    async def counted(more: int) -> int:
        for _ in range(more):
            await new_session(store)
        steps.clear()
        await store.write(op)
        return len(steps)

    few, more = await counted(0), await counted(60)
    assert more - few < 60, "not a step for each"


async def used(store: Store, sampler: SamplingSessionId, number: int = 0) -> None:
    """A sample that took a token."""
    accepted = await sample(store, sampler, number)
    future = (await outcome(store, accepted.request_id)).future_id
    await store.write(lambda conn: finish.succeed(conn, future, "t", b"r", Usage(input_tokens=1)))
