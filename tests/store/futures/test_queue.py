"""Futures end once, and what they ended with can be fetched any number of times."""

import asyncio
import time

import pytest
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelState, RequestKind, SamplingSessionId, SessionId
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.store import model_records, usage_records
from skyrl_tinker.store.console import pending
from skyrl_tinker.store.futures import cancellation, finish, outcomes, queue, record, training_submission
from skyrl_tinker.store.futures.training_submission import Creation
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.reports import training_runs
from skyrl_tinker.store.retention import row_purges, session_purges
from skyrl_tinker.store.store import Store
from tests.store.support.rows import create, finish_session, new_session, outcome, queued, sample, step
from tests.support.reads import reading

LOST = Failure("the engine died", "server")


async def id_of(store: Store, accepted: record.Accepted) -> int:
    return (await outcome(store, accepted.request_id)).future_id


async def succeed(store: Store, accepted: record.Accepted, body: bytes) -> None:
    future_id = await id_of(store, accepted)
    await store.write(lambda conn: finish.succeed(conn, future_id, "application/x-protobuf", body))


async def fail(store: Store, accepted: record.Accepted) -> None:
    future_id = await id_of(store, accepted)
    await store.write(lambda conn: finish.fail(conn, future_id, LOST))


async def test_a_result_can_be_fetched_again_and_again(store: Store, model: ModelRow) -> None:
    accepted = await step(store, model, 1)
    await succeed(store, accepted, b"\x00\xff")
    first, again = await outcome(store, accepted.request_id), await outcome(store, accepted.request_id)
    assert first == again
    assert (first.status, first.content_type, first.body) == ("done", "application/x-protobuf", b"\x00\xff")
    assert first.kind is RequestKind.OPTIM_STEP


async def test_a_pending_future_has_no_body(store: Store, sampler: SamplingSessionId) -> None:
    found = await outcome(store, (await sample(store, sampler, 1)).request_id)
    assert (found.status, found.body, found.content_type) == ("pending", None, None)


async def test_an_unknown_request_has_no_outcome(store: Store) -> None:
    with reading(store) as conn:
        assert outcomes.find(conn, "nobody") is None  # type: ignore[arg-type]


async def test_the_first_end_of_a_future_stands_and_a_failure_is_logged(
    store: Store, model: ModelRow, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    accepted = await step(store, model, 1)
    await fail(store, accepted)
    await fail(store, accepted)
    session = model.model_id.partition(":")[0]
    told = f"optim_step {accepted.request_id} of session {session} failed: the engine died"
    assert [each for each in caplog.messages if "failed" in each] == [told]
    await succeed(store, accepted, b"late")
    found = await outcome(store, accepted.request_id)
    assert (found.status, found.body) == ("failed", b'{"error":"the engine died","category":"server"}')


async def test_a_failure_that_is_undone_is_not_logged_and_one_that_is_tried_again_is_logged_once(
    store: Store, model: ModelRow, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first, second = [await id_of(store, await step(store, model, seq_id)) for seq_id in (1, 2)]

    def undone(conn: Connection) -> None:
        finish.fail(conn, second, LOST)
        raise UserError("no")

    await asyncio.gather(
        store.write(lambda conn: finish.fail(conn, first, LOST)), store.write(undone), return_exceptions=True
    )
    assert sum("failed: the engine died" in line for line in caplog.messages) == 1


async def test_finished_futures_come_in_the_order_in_which_they_finished(
    store: Store, model: ModelRow
) -> None:
    accepted = [await step(store, model, seq_id) for seq_id in (1, 2, 3)]
    cursor = await store.read(outcomes.last_result_id)
    for index in (2, 0):
        await succeed(store, accepted[index], b"")
    await fail(store, accepted[1])
    with reading(store) as conn:
        finished = outcomes.finished_after(conn, cursor)
        newest = outcomes.last_result_id(conn)
        rest = outcomes.finished_after(conn, finished[0][0])
        nothing = outcomes.finished_after(conn, newest)
    assert [outcome.request_id for _, outcome in finished] == [accepted[i].request_id for i in (2, 0, 1)]
    assert rest == finished[1:]
    assert newest == finished[-1][0]
    assert nothing == []


async def test_the_queue_goes_on_after_the_cursor(store: Store, model: ModelRow) -> None:
    for seq_id in (2, 3, 1):
        await step(store, model, seq_id, body=b"x" * 1000 * seq_id)
    rows = await queued(store)
    assert [(row.seq_id, row.body_bytes) for row in rows] == [(0, 6), (2, 2000), (3, 3000), (1, 1000)]
    assert await queued(store, rows[-1].id) == []
    with reading(store) as conn:
        assert queue.queued_after(conn, 0, limit=2) == rows[:2]
        bodies = queue.read_bodies(conn, [row.id for row in rows[1:3]])
    assert {key: len(body) for key, body in bodies.items()} == {rows[1].id: 2000, rows[2].id: 3000}


async def test_requests_have_the_base_model_of_their_model_or_sampling_session(
    store: Store, model: ModelRow, sampler: SamplingSessionId
) -> None:
    accepted = await sample(store, sampler, 1)
    assert [row.base_model for row in await queued(store)] == ["tiny", "tiny"]
    with reading(store) as conn:
        position = cancellation.queue_position(conn, accepted.request_id)
        oldest = [group.oldest for group in pending.pending_groups(conn) if group.sampling]
    assert position is not None
    assert (position.base_model, oldest) == ("tiny", [position])


async def test_a_finished_request_leaves_the_queue_and_its_body(
    store: Store, model: ModelRow, sampler: SamplingSessionId
) -> None:
    done, failed_sample = await step(store, model, 1), await sample(store, sampler, 1)
    await succeed(store, done, b"")
    await fail(store, failed_sample)
    assert [row.seq_id for row in await queued(store)] == [0]
    ids = [await id_of(store, accepted) for accepted in (done, failed_sample)]
    with reading(store) as conn:
        assert queue.read_bodies(conn, ids) == {}


async def test_a_new_engine_reads_from_the_first_request_that_has_not_finished(
    store: Store, model: ModelRow, sampler: SamplingSessionId
) -> None:
    (creation,) = await queued(store)
    finished, pending = await step(store, model, 1), await step(store, model, 2)
    sampled = await sample(store, sampler, 1)
    await store.write(lambda conn: finish.succeed(conn, creation.id, finish.JSON_TYPE, b"{}"))
    await succeed(store, finished, b"ok")
    with reading(store) as conn:
        assert queue.pending_of(conn, model.key) == [await id_of(store, pending)]
        cursor = queue.before_waiting(conn, {})
    assert [row.id for row in await queued(store, cursor)] == [
        await id_of(store, accepted) for accepted in (pending, sampled)
    ]
    for accepted in (pending, sampled):
        await succeed(store, accepted, b"")
    with reading(store) as conn:
        assert queue.before_waiting(conn, {}) == await id_of(store, sampled)
        assert queue.before_waiting(conn, {model.key: 2}) == await id_of(store, pending) - 1
        assert queue.pending_of(conn, model.key) == []


async def test_old_results_are_purged_and_their_requests_still_known(store: Store, model: ModelRow) -> None:
    old, new = await step(store, model, 1), await step(store, model, 2)
    await succeed(store, old, b"old")
    between = time.time()
    await succeed(store, new, b"new")
    await store.write(usage_records.roll_up)
    await store.write(lambda conn: row_purges.purge_results(conn, between))
    purged = await outcome(store, old.request_id)
    assert (purged.status, purged.body) == ("done", None)
    assert (await outcome(store, new.request_id)).body == b"new"
    assert (await step(store, model, 1)).request_id == old.request_id


async def test_cursors_start_at_zero(store: Store) -> None:
    with reading(store) as conn:
        assert queue.before_waiting(conn, {}) == 0
        assert outcomes.last_result_id(conn) == 0


async def test_a_model_is_as_it_was_asked_for(store: Store, session: SessionId, model: ModelRow) -> None:
    assert model.model_id == f"{session}:train:0"
    assert (model.state, model.state_reason, model.base_model) == (ModelState.CREATING, None, "tiny")
    assert (model.spec.rank, model.spec.seed, model.spec.train_unembed) == (8, 2**62, False)
    assert (model.optimizer_config, model.user_metadata) == ({"betas": [0.9]}, {"run": "x"})


async def test_requests_keep_a_model_fresh(store: Store, model: ModelRow) -> None:
    def last_request_at() -> float:
        with reading(store) as conn:
            return training_runs.find(conn, None, model.model_id, "owned").row.last_request_at

    created_at = last_request_at()
    await step(store, model, 1)
    asked_at = last_request_at()
    assert asked_at > created_at
    (row,) = [row for row in await queued(store) if row.seq_id == 1]
    await store.write(lambda conn: finish.succeed(conn, row.id, "application/json", b"{}"))
    await finish_session(store, model.session_id)
    await store.write(lambda conn: session_purges.clear_session(conn, model.session_id))
    assert last_request_at() == asked_at, "also when the request itself is gone"


async def test_models_are_found_by_state_and_session(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    other = await create(store, await new_session(store))
    await store.write(lambda conn: model_records.set_state(conn, model.key, ModelState.LOST, "worker died"))
    with reading(store) as conn:
        (lost,) = model_records.list_in_states(conn, ModelState.LOST, ModelState.FAILED)
        (creating,) = model_records.list_in_states(conn, ModelState.CREATING)
        (own,) = model_records.list_for_session(conn, session)
    assert (lost.key, lost.state_reason) == (model.key, "worker died")
    assert creating.key == other.key
    assert own.key == model.key


async def test_a_model_learns_its_spec_from_a_checkpoint(store: Store, model: ModelRow) -> None:
    spec = type(model.spec)(rank=32, seed=5, train_mlp=False)
    await store.write(lambda conn: model_records.set_spec(conn, model.key, spec, {"beta1": 0.5}))
    row = await store.read(lambda conn: model_records.by_key(conn, model.key))
    assert (row.spec, row.optimizer_config) == (spec, {"beta1": 0.5})


async def test_a_model_refused_at_the_door_is_born_failed(store: Store, session: SessionId) -> None:
    new = model_records.NewModel(session, 0, "other", model_records.LoraSpec(8, 1), {}, {})
    failure = Failure("this server serves 'tiny', not 'other'", "user")
    accepted = await store.write(
        lambda conn: training_submission.submit_create(
            conn, Creation(RequestKind.CREATE_MODEL, new, b"", failure=failure), owner=None
        )
    )
    assert (await outcome(store, accepted.request_id)).body == finish.failure_body(failure)
    row = await store.read(lambda conn: model_records.by_id(conn, new.model_id))
    assert row is not None
    assert (row.state, row.state_reason) == (ModelState.FAILED, failure.message)
