"""Bodies of passes behind a snapshot: the newest stay, to be read."""

import pytest
from sqlalchemy import Connection, select
from tinker.types.client_config_response import ClientConfigResponse

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.store.database.tables import Future, Request
from skyrl_tinker.store.futures import finish, training_submission
from skyrl_tinker.store.futures.training_submission import Submission
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.store import Store
from tests.store.support.rows import create, new_session, step
from tests.support.reads import reading


async def run_pass(
    store: Store, model: ModelRow, seq_id: int, size: int, kind: RequestKind = RequestKind.FORWARD_BACKWARD
) -> None:
    submission = Submission(kind, model.model_id, seq_id, b"digest", bytes(size))
    await store.write(lambda conn: training_submission.submit_training(conn, submission, owner=None))


def end_all(conn: Connection) -> None:
    ids = list(conn.scalars(select(Future.id)))
    finish.finish_all(conn, dict.fromkeys(ids, finish.FutureResult("t", b"")), ids)


def stored(store: Store, model: ModelRow) -> list[int | None]:
    """Return the seq_ids of the requests that have a body."""
    query = select(Future.seq_id).join(Request, Request.future_id == Future.id)
    with reading(store) as conn:
        return list(conn.scalars(query.where(Future.model_key == model.key).order_by(Future.seq_id)))


async def test_of_a_pass_that_is_too_large_the_ones_before_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_records, "KEPT_BYTES", 25)
    model = await create(store, await new_session(store))
    for seq_id, size in enumerate((10, 10, 10, 26, 10), 1):
        await run_pass(store, model, seq_id, size)
    await store.write(end_all)
    while await store.write(lambda conn: unit_records.drop_bodies(conn, model.key, 100)) is None:
        pass
    assert stored(store, model) == [3, 5]


async def test_forwards_which_no_replay_needs_stay_among_the_newest_passes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_records, "KEPT", 3)
    model, forward = await create(store, await new_session(store)), RequestKind.FORWARD
    for seq_id in (1, 3, 4, 6, 7):
        await run_pass(store, model, seq_id, 10, forward)
    for seq_id in (2, 5):
        await run_pass(store, model, seq_id, 10)
    await store.write(end_all)
    dropped = await store.write(lambda conn: unit_records.drop_bodies(conn, model.key, 0))
    assert stored(store, model) == [2, 4, 5, 6, 7], "the others are behind no snapshot"
    assert dropped == 3
    assert await store.write(lambda conn: unit_records.drop_bodies(conn, model.key, 0, dropped)) == 3
    await store.write(lambda conn: unit_records.drop_bodies(conn, model.key, 100))
    assert stored(store, model) == [5, 6, 7]


async def test_a_batch_of_three_of_the_largest_requests_of_the_sdk_stays(store: Store) -> None:
    config = ClientConfigResponse()
    model = await create(store, await new_session(store))
    for seq_id in (1, 2, 3):
        await run_pass(store, model, seq_id, int(1.02 * config.fwdbwd_max_chunk_bytes_count))
    await store.write(end_all)
    await store.write(lambda conn: unit_records.drop_bodies(conn, model.key, 100))
    assert stored(store, model) == [1, 2, 3]


@pytest.mark.parametrize(("most", "size"), [(32, 25), (2, 1 << 20)])
async def test_bodies_of_the_newest_passes_stay_behind_a_snapshot(
    store: Store, monkeypatch: pytest.MonkeyPatch, most: int, size: int
) -> None:
    monkeypatch.setattr(unit_records, "KEPT", most)
    monkeypatch.setattr(unit_records, "KEPT_BYTES", size)
    monkeypatch.setattr(unit_records, "SLICE", 2)
    model, other = [await create(store, await new_session(store)) for _ in range(2)]
    for seq_id in (1, 2, 4, 5, 7):
        await run_pass(store, model, seq_id, 10)
    for seq_id in (3, 6):
        await step(store, model, seq_id)
    await run_pass(store, other, 1, 10)
    await store.write(end_all)
    with reading(store) as conn:
        assert unit_records.models_with_bodies(conn) == [model.key]
    calls = 1
    while await store.write(lambda conn: unit_records.drop_bodies(conn, model.key, 6)) is None:
        calls += 1
    assert (stored(store, model), calls) == ([4, 5, 7], 3), "the last is behind no snapshot"
    while await store.write(lambda conn: unit_records.drop_bodies(conn, model.key, 100)) is None:
        pass
    assert (stored(store, model), stored(store, other)) == ([5, 7], [0, 1])
    with reading(store) as conn:
        assert unit_records.models_with_bodies(conn) == []
