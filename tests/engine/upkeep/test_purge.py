"""What a purge of everything that is too old takes, and leaves."""

import time

import pytest
from sqlalchemy import Connection, select

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Usage
from skyrl_tinker.engine.upkeep.purge import Purge
from skyrl_tinker.errors import SeqIdReusedError
from skyrl_tinker.store.database.tables import Future
from skyrl_tinker.store.futures import finish, training_submission
from skyrl_tinker.store.futures.finish import Ran
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.training_submission import Submission
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay import snapshot_records, unit_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.store import Store
from tests.store.support.rows import create, new_session, outcome, step
from tests.support.reads import reading

DAY_S = 86400.0


async def answer(store: Store, accepted: Accepted, *, ran: bool = True) -> None:
    """Finish a request with a result that is counted; `ran`: in the unit of its own number."""
    future_id = (await outcome(store, accepted.request_id)).future_id

    def op(conn: Connection) -> None:
        if ran:
            finish.record(conn, future_id, Ran(future_id))
        finish.succeed(conn, future_id, "t", b"r", Usage(1, 0, 1))

    await store.write(op)


async def forward(store: Store, model: ModelRow, seq_id: int) -> Accepted:
    kind = RequestKind.FORWARD
    return await store.write(
        lambda conn: training_submission.submit_training(
            conn, Submission(kind, model.model_id, seq_id, b"", b""), owner=None
        )
    )


async def seq_ids_after(store: Store, days: float) -> list[int | None]:
    """Numbers that are left of what is there now, once so many days have gone."""
    await Purge(store, Settings()).run(time.time() + days * DAY_S)
    return await store.read(lambda conn: list(conn.scalars(select(Future.seq_id).order_by(Future.seq_id))))


async def test_what_a_model_ran_before_its_snapshot_goes_and_is_not_accepted_again(store: Store) -> None:
    model = await create(store, await new_session(store))
    accepted = [await step(store, model, seq_id) for seq_id in range(1, 7)]
    for each in accepted[:5]:
        await answer(store, each)
    assert await seq_ids_after(store, 9) == [0, 1, 2, 3, 4, 5, 6], "no snapshot holds their effects"
    snapshot = SnapshotRow(4, "/snapshots/4", optimizer=True)
    await store.write(lambda conn: snapshot_records.put(conn, model.key, snapshot))
    assert await seq_ids_after(store, 1.5) == [0, 1, 2, 3, 4, 5, 6], "they are kept for two days"
    assert await seq_ids_after(store, 3) == [0, 4, 5, 6]
    with pytest.raises(SeqIdReusedError, match=r"seq_id 3 of model .* its record is gone by now"):
        await step(store, model, 3)
    assert (await step(store, model, 5)).request_id == accepted[4].request_id


async def test_forwards_go_without_a_snapshot_and_the_model_goes_on_behind_them(store: Store) -> None:
    """As of a model that only scores: nothing of it is replayed, but the next engine must know its place."""
    model = await create(store, await new_session(store))
    for seq_id in (1, 2):
        await answer(store, await forward(store, model, seq_id))
    await answer(store, await step(store, model, 3))
    for seq_id in range(4, 200):
        await answer(store, await forward(store, model, seq_id))
    await answer(store, await forward(store, model, 200), ran=False)  # refused, and not yet come to
    waits = await forward(store, model, 201)
    assert await seq_ids_after(store, 1.5) == list(range(202)), "they are kept for two days"
    with reading(store) as conn:
        place = unit_records.next_seq(conn, model.key), unit_records.next_unit(conn)
    assert await seq_ids_after(store, 3) == [0, 3, 199, 200, 201]
    with reading(store) as conn:
        assert (unit_records.next_seq(conn, model.key), unit_records.next_unit(conn)) == place
    for gone in (1, 150):
        with pytest.raises(SeqIdReusedError, match="its record is gone by now"):
            await forward(store, model, gone)
    assert (await forward(store, model, 201)).request_id == waits.request_id
    assert (await forward(store, model, 202)).created
