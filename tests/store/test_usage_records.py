"""Usage: each result is counted once, and stays counted when it is purged."""

import time

from sqlalchemy import func, select, update

from skyrl_tinker.domain.ids import RequestKind, SamplingSessionId, SessionId
from skyrl_tinker.domain.values import Failure, Usage
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.database.tables import Future, Result
from skyrl_tinker.store.futures import finish, outcomes
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.retention import row_purges
from skyrl_tinker.store.store import Store
from skyrl_tinker.store.usage_records import HOUR_S, Hourly
from tests.store.support.rows import sample
from tests.support.reads import reading

HOUR = int(time.time() // HOUR_S)


async def sampled(
    store: Store, sampler: SamplingSessionId, number: int, used: Usage, hour: int = HOUR
) -> None:
    request = await sample(store, sampler, number)
    found = await store.read(lambda conn: outcomes.find(conn, request.request_id))
    assert found is not None
    future = found.future_id
    await store.write(lambda conn: finish.succeed(conn, future, "t", b"r", used))
    at = update(Future).where(Future.id == future).values(finished_at=hour * HOUR_S + 1.0)
    await store.write(lambda conn: conn.execute(at))


async def between(store: Store, first: int = HOUR, end: int = HOUR + 1) -> list[Hourly]:
    return await store.fetch(lambda conn: usage_records.hourly_between(conn, None, first, end))


async def test_what_is_used_adds_up_by_hour(
    store: Store, session: SessionId, sampler: SamplingSessionId
) -> None:
    await sampled(store, sampler, 0, Usage(10, 4, 3))
    await sampled(store, sampler, 1, Usage(1, 0, 2))
    await sampled(store, sampler, 2, Usage(5, 5, 5), HOUR - 1)
    row = Hourly(HOUR, session, "tiny", RequestKind.SAMPLE, Usage(11, 4, 5))
    assert await between(store) == [row]
    both = await between(store, HOUR - 1, HOUR + 1)
    assert {each.hour: each.usage for each in both} == {HOUR: Usage(11, 4, 5), HOUR - 1: Usage(5, 5, 5)}
    assert await between(store, HOUR + 1, HOUR + 2) == []


async def test_nothing_changes_however_often_and_in_whatever_steps_it_is_rolled_up(
    store: Store, session: SessionId, sampler: SamplingSessionId
) -> None:
    for number in range(5):
        await sampled(store, sampler, number, Usage(1, 1, 10**number))
    before = await between(store)
    steps = 0
    while await store.write(lambda conn: usage_records.roll_up(conn, 2)):
        steps += 1
        assert await between(store) == before
    assert steps == 2
    await sampled(store, sampler, 5, Usage(1, 0, 0))
    await store.write(usage_records.roll_up)
    (after,) = await between(store)
    assert after.usage == before[0].usage + Usage(1, 0, 0)


async def test_a_purged_result_stays_counted(store: Store, sampler: SamplingSessionId) -> None:
    await sampled(store, sampler, 0, Usage(10, 4, 3))
    before = await between(store)
    await store.write(lambda conn: row_purges.purge_results(conn, time.time() + 1))
    with reading(store) as conn:
        assert conn.scalar(select(func.count()).select_from(Result)) == 1, "it is not counted yet"
    await store.write(usage_records.roll_up)
    await store.write(lambda conn: row_purges.purge_results(conn, time.time() + 1))
    with reading(store) as conn:
        assert conn.scalar(select(func.count()).select_from(Result)) == 0
    assert await between(store) == before
    assert before[0].usage == Usage(10, 4, 3)


async def test_what_failed_is_not_counted(store: Store, sampler: SamplingSessionId, model: ModelRow) -> None:
    request = await sample(store, sampler, 0)
    found = await store.read(lambda conn: outcomes.find(conn, request.request_id))
    assert found is not None
    await store.write(lambda conn: finish.fail(conn, found.future_id, Failure("no", "user")))
    assert await between(store) == []
    await store.write(usage_records.roll_up)
    assert await between(store) == []
