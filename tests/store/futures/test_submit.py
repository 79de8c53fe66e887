"""The same request again gets the first answer; the same key with another request is refused."""

import asyncio

import pytest

from skyrl_tinker.domain.ids import ModelId, RequestKind, SamplingSessionId, SessionId, VersionId
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.errors import GoneError, NotFoundError, SeqIdReusedError, UserError
from skyrl_tinker.store import sampling_sessions
from skyrl_tinker.store.futures import finish, record, training_submission
from skyrl_tinker.store.futures.training_submission import Submission
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.store.support.rows import (
    base_sampler,
    create,
    ephemeral,
    finish_session,
    outcome,
    queued,
    sample,
    step,
    submit_create,
)


async def test_a_training_request_sent_twice_runs_once(store: Store, model: ModelRow) -> None:
    first = await step(store, model, 1)
    again = await step(store, model, 1)
    assert first.created
    assert not again.created
    assert again.request_id == first.request_id
    assert [row.seq_id for row in await queued(store)] == [0, 1]


async def test_duplicates_that_race_get_one_answer(store: Store, model: ModelRow) -> None:
    answers = await asyncio.gather(*(step(store, model, 1) for _ in range(50)))
    assert len({accepted.request_id for accepted in answers}) == 1
    assert sum(accepted.created for accepted in answers) == 1


async def test_duplicates_that_race_over_two_processes_get_one_answer(
    store: Store, url: str, model: ModelRow
) -> None:
    other = Store.open(url)
    try:
        answers = await asyncio.gather(
            *(step(s, model, i % 20 + 1) for i in range(80) for s in (store, other))
        )
    finally:
        await other.close()
    assert len({accepted.request_id for accepted in answers}) == 20
    assert sum(accepted.created for accepted in answers) == 20


async def test_a_finished_request_sent_again_keeps_its_answer(store: Store, model: ModelRow) -> None:
    first = await step(store, model, 1)
    (row,) = [row for row in await queued(store) if row.seq_id == 1]
    await store.write(lambda conn: finish.succeed(conn, row.id, "application/json", b"{}"))
    assert (await step(store, model, 1)).request_id == first.request_id
    assert (await outcome(store, first.request_id)).body == b"{}"


async def test_a_seq_id_reused_for_another_payload_is_refused(store: Store, model: ModelRow) -> None:
    await step(store, model, 7, digest=b"\x01" * 32)
    with pytest.raises(SeqIdReusedError, match=r"seq_id 7 of model .*another payload.*010101.*020202"):
        await step(store, model, 7, digest=b"\x02" * 32)


async def test_a_seq_id_reused_for_another_kind_is_refused(store: Store, model: ModelRow) -> None:
    await step(store, model, 1)
    with pytest.raises(SeqIdReusedError, match="used for optim_step, now for forward_backward"):
        await store.write(
            lambda conn: training_submission.submit_training(
                conn, Submission(RequestKind.FORWARD_BACKWARD, model.model_id, 1, b"digest", b""), owner=None
            )
        )


async def test_models_have_seq_ids_of_their_own(store: Store, session: SessionId, model: ModelRow) -> None:
    other = await create(store, session, 1)
    first, second = await step(store, model, 1), await step(store, other, 1)
    assert first.request_id != second.request_id


async def test_a_model_created_twice_is_one_model(store: Store, session: SessionId) -> None:
    first, again = await submit_create(store, session, 3), await submit_create(store, session, 3)
    assert first.model_id == again.model_id == f"{session}:train:3"
    assert first.request_id == again.request_id
    assert (first.created, again.created) == (True, False)


async def test_a_model_seq_id_reused_for_another_model_is_refused(store: Store, session: SessionId) -> None:
    await submit_create(store, session, 3)
    with pytest.raises(SeqIdReusedError, match=f"model_seq_id 3 of session {session}"):
        await submit_create(store, session, 3, digest=b"other")


async def test_a_sample_sent_twice_keeps_its_sequence_ids(store: Store, sampler: SamplingSessionId) -> None:
    first, again = await sample(store, sampler, 1), await sample(store, sampler, 1)
    assert first.sequence_ids == tuple(f"{first.request_id}-{i}" for i in range(2))
    assert again.sequence_ids == first.sequence_ids
    assert (first.created, again.created) == (True, False)


async def test_a_sample_seq_id_reused_is_refused(store: Store, sampler: SamplingSessionId) -> None:
    await sample(store, sampler, 1)
    with pytest.raises(SeqIdReusedError, match=f"seq_id 1 of sampling session {sampler}"):
        await sample(store, sampler, 1, digest=b"other")


async def test_sample_seq_ids_of_cloned_samplers_fit(store: Store, sampler: SamplingSessionId) -> None:
    big = 10**18
    first = await sample(store, sampler, big)
    assert (await sample(store, sampler, big)).request_id == first.request_id
    assert (await queued(store))[-1].seq_id == big


@pytest.mark.parametrize("seq_id", [0, -1, 2**63])
async def test_seq_ids_out_of_range_are_refused(store: Store, model: ModelRow, seq_id: int) -> None:
    with pytest.raises(UserError, match="seq_id must lie between 1 and"):
        await step(store, model, seq_id)


async def test_a_sampling_session_made_twice_is_one(store: Store, session: SessionId) -> None:
    assert await base_sampler(store, session) == await base_sampler(store, session) == f"{session}:sample:0"


async def test_a_sampling_session_seq_id_reused_for_another_target_is_refused(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    async def make(base: str, path: str | None, version: VersionId | None) -> None:
        await store.write(
            lambda conn: sampling_sessions.create(
                conn, session, 5, base_model=base, model_path=path, version_id=version
            )
        )

    await make("tiny", None, None)
    with pytest.raises(SeqIdReusedError, match="base_model 'tiny', now 'large'"):
        await make("large", None, None)
    with pytest.raises(SeqIdReusedError, match="model_path None, now 'tinker://x/weights/y'"):
        await make("tiny", "tinker://x/weights/y", None)
    version = await ephemeral(store, model.key)
    with pytest.raises(SeqIdReusedError, match=f"weight version None, now {version}"):
        await make("tiny", None, version)


async def test_a_retried_sampling_session_on_an_overwritten_checkpoint_keeps_its_version(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    first, second = await ephemeral(store, model.key), await ephemeral(store, model.key)
    for version in (first, second):
        sampler = await store.write(
            lambda conn, version=version: sampling_sessions.create(  # type: ignore[misc]
                conn, session, 0, base_model="tiny", model_path="tinker://p", version_id=version
            )
        )
    row = await store.read(lambda conn: sampling_sessions.get(conn, sampler))
    assert row is not None
    assert row.version_id == first


async def test_a_request_refused_at_the_door_consumes_its_seq_id(store: Store, model: ModelRow) -> None:
    failure = Failure("datum 0: token 9 is beyond the vocabulary", "user")

    async def submit() -> record.Accepted:
        return await store.write(
            lambda conn: training_submission.submit_training(
                conn, Submission(RequestKind.FORWARD, model.model_id, 1, b"d", b"", failure), owner=None
            )
        )

    first, again = await submit(), await submit()
    assert first.request_id == again.request_id
    found = await outcome(store, first.request_id)
    assert found.status == "failed"
    assert found.body == b'{"error":"datum 0: token 9 is beyond the vocabulary","category":"user"}'
    row = (await queued(store))[-1]
    assert (row.seq_id, row.status, row.body_bytes) == (1, "failed", 0)


async def test_unknown_owners_are_not_found(store: Store, model: ModelRow) -> None:
    with pytest.raises(NotFoundError, match="no model nobody"):
        await store.write(
            lambda conn: training_submission.submit_training(
                conn, Submission(RequestKind.FORWARD, ModelId("nobody"), 1, b"", b""), owner=None
            )
        )
    with pytest.raises(NotFoundError, match="no sampling session nobody"):
        await sample(store, SamplingSessionId("nobody"), 1)
    with pytest.raises(NotFoundError, match="no session nobody"):
        await submit_create(store, SessionId("nobody"))


async def test_a_finished_session_takes_nothing_new_but_answers_retries(
    store: Store, session: SessionId, model: ModelRow, sampler: SamplingSessionId
) -> None:
    first_step, first_sample = await step(store, model, 1), await sample(store, sampler, 1)
    await finish_session(store, session)
    for late in (
        step(store, model, 2),
        sample(store, sampler, 2),
        submit_create(store, session, 9),
        base_sampler(store, session, 9),
    ):
        with pytest.raises(GoneError, match=f"session {session} is finished"):
            await late
    assert (await step(store, model, 1)).request_id == first_step.request_id
    assert (await sample(store, sampler, 1)).request_id == first_sample.request_id
