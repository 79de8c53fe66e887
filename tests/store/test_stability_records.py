"""What was sampled is kept for the session that sampled it, until nobody has used it for a time."""

import time
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tinker.domain.ids import FutureStatus, SamplingSessionId, SessionId
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.store import stability_records
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.retention import row_purges
from skyrl_tinker.store.stability_records import RoutingRecord, SequenceRecord
from skyrl_tinker.store.store import Store
from tests.store.support.rows import outcome, sample
from tests.support.reads import reading


def record_of(sequence_id: str, *tokens: int, prompt_length: int = 4) -> SequenceRecord:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 7
    return SequenceRecord(sequence_id, np.array(tokens, np.int32), logprobs, prompt_length)


async def add(store: Store, accepted: Accepted, *records: SequenceRecord) -> None:
    future_id = (await outcome(store, accepted.request_id)).future_id
    await store.write(lambda conn: stability_records.add(conn, {future_id: records}))


async def found_ids(store: Store, ids: tuple[str, ...]) -> set[str]:
    return await store.read(lambda conn: {name for _, name in stability_records.find(conn, ids)})


@pytest.fixture
async def sampled(store: Store, sampler: SamplingSessionId) -> Accepted:
    """Two sequences with records."""
    accepted = await sample(store, sampler, 1)
    await add(store, accepted, *(record_of(name, 5, 500_000) for name in accepted.sequence_ids))
    return accepted


async def test_a_record_comes_back_bit_by_bit_under_its_session(
    store: Store, session: SessionId, sampler: SamplingSessionId
) -> None:
    accepted = await sample(store, sampler, 1)
    first, second = (record_of(name, 7, index) for index, name in enumerate(accepted.sequence_ids))
    await add(store, accepted, first, second)
    found = await store.read(lambda conn: stability_records.find(conn, accepted.sequence_ids))
    assert set(found) == {(session, name) for name in accepted.sequence_ids}
    for record in (first, second):
        again = found[session, record.sequence_id]
        np.testing.assert_array_equal(again.tokens, record.tokens, strict=True)
        np.testing.assert_array_equal(again.logprobs, record.logprobs, strict=True)
        assert again.prompt_length == 4


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
async def test_a_record_of_experts_comes_back_with_its_shape_and_type(
    store: Store, session: SessionId, sampler: SamplingSessionId, dtype: type[np.generic]
) -> None:
    accepted = await sample(store, sampler, 1)
    experts = np.arange(4 * 3 * 2).reshape(4, 3, 2).astype(dtype)
    routing = RoutingRecord(np.array([500_000, 7, 9], np.int32), experts)
    with_experts, without = (record_of(name, 7, 8, prompt_length=3) for name in accepted.sequence_ids)
    await add(store, accepted, replace(with_experts, routing=routing), without)
    found = await store.read(lambda conn: stability_records.find(conn, accepted.sequence_ids))
    again = found[session, with_experts.sequence_id].routing
    assert again is not None
    np.testing.assert_array_equal(again.prompt, routing.prompt, strict=True)
    np.testing.assert_array_equal(again.experts, experts, strict=True)
    assert found[session, without.sequence_id].routing is None


async def test_what_has_no_record_is_not_found(store: Store, sampled: Accepted) -> None:
    asked = (sampled.sequence_ids[0], f"{sampled.request_id}-2", "nobody", "")
    assert await found_ids(store, asked) == {sampled.sequence_ids[0]}
    assert await found_ids(store, ()) == set()


async def test_more_ids_than_one_statement_takes_are_found(store: Store, sampled: Accepted) -> None:
    asked = (*(f"nobody-{i}" for i in range(40_000)), *sampled.sequence_ids)
    assert await found_ids(store, asked) == set(sampled.sequence_ids)
    await store.write(lambda conn: stability_records.renew(conn, asked))


async def test_use_keeps_a_record_and_disuse_ends_it(store: Store, sampled: Accepted) -> None:
    used, unused = sampled.sequence_ids
    made = time.time()
    await store.write(lambda conn: stability_records.renew(conn, [used]))
    await store.write(lambda conn: row_purges.purge_stability(conn, made))
    assert await found_ids(store, sampled.sequence_ids) == {used}
    await store.write(lambda conn: row_purges.purge_stability(conn, time.time()))
    assert await found_ids(store, (used, unused)) == set()


async def test_the_fate_of_a_sequence_is_that_of_its_request(
    store: Store, session: SessionId, sampler: SamplingSessionId, model: ModelRow
) -> None:
    pending, done, failed = [await sample(store, sampler, seq_id) for seq_id in (1, 2, 3)]
    ids = [(await outcome(store, each.request_id)).future_id for each in (done, failed)]
    await store.write(lambda conn: finish.succeed(conn, ids[0], "application/json", b"{}"))
    await store.write(lambda conn: finish.fail(conn, ids[1], Failure("no", "user")))
    asked = [each.sequence_ids[1] for each in (pending, done, failed)]
    with reading(store) as conn:
        fates = stability_records.request_statuses(
            conn, [*asked, "nobody-0", model.model_id, f"{done.request_id}-2"]
        )
    statuses = FutureStatus.PENDING, FutureStatus.DONE, FutureStatus.FAILED
    assert {name: fates.get((session, name)) for name in asked} == dict(zip(asked, statuses, strict=True))
    assert (session, f"{done.request_id}-2") not in fates
    assert (session, "nobody-0") not in fates
