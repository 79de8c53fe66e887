"""What a purge of everything that is too old takes, and leaves."""

import time

import pytest
from sqlalchemy import select

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.values import Usage
from skyrl_tinker.engine.upkeep.purge import Purge
from skyrl_tinker.errors import SeqIdReusedError
from skyrl_tinker.store.database.tables import Future
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.replay import snapshot_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.store import Store
from tests.store.support.rows import create, new_session, outcome, step
from tests.support.reads import reading

DAY_S = 86400.0


async def test_what_a_model_ran_before_its_snapshot_goes_and_is_not_accepted_again(store: Store) -> None:
    model = await create(store, await new_session(store))
    accepted = [await step(store, model, seq_id) for seq_id in range(1, 7)]
    for each in accepted[:5]:
        future_id = (await outcome(store, each.request_id)).future_id
        await store.write(lambda conn, key=future_id: finish.succeed(conn, key, "t", b"r", Usage(1, 0, 1)))

    async def seq_ids_after(days: float) -> list[int | None]:
        await Purge(store, Settings()).run(time.time() + days * DAY_S)
        with reading(store) as conn:
            return list(conn.scalars(select(Future.seq_id).order_by(Future.seq_id)))

    assert await seq_ids_after(9) == [0, 1, 2, 3, 4, 5, 6], "no snapshot holds their effects"
    snapshot = SnapshotRow(4, "/snapshots/4", optimizer=True)
    await store.write(lambda conn: snapshot_records.put(conn, model.key, snapshot))
    assert await seq_ids_after(1.5) == [0, 1, 2, 3, 4, 5, 6], "they are kept for two days"
    assert await seq_ids_after(3) == [0, 4, 5, 6]
    with pytest.raises(SeqIdReusedError, match=r"seq_id 3 of model .* its record is gone by now"):
        await step(store, model, 3)
    assert (await step(store, model, 5)).request_id == accepted[4].request_id
