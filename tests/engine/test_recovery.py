"""After an engine died, models that it had created say so, and the rest goes on."""

from pathlib import Path

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelId, ModelState
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.recovery import first_unread, give_up_models, sweep_partial
from skyrl_tinker.store import checkpoint_records, model_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.futures import finish, queue
from skyrl_tinker.store.store import Store
from tests.engine.support import journal


async def ready_model(store: Store) -> ModelId:
    accepted = await journal.submit_create(store, await journal.new_session(store))
    assert accepted.model_id is not None
    key = await journal.key_of(store, accepted.model_id)
    done = await journal.outcome(store, accepted)
    await store.write(lambda conn: model_records.set_state(conn, key, ModelState.READY))
    await store.write(lambda conn: finish.succeed(conn, done.future_id, "application/json", b"{}"))
    return accepted.model_id


async def test_a_model_of_the_dead_engine_is_lost_and_names_its_last_checkpoint(store: Store) -> None:
    model = await ready_model(store)
    key = await journal.key_of(store, model)
    new = NewCheckpoint(key, CheckpointKind.WEIGHTS, "0007", "/nowhere", "tiny", LoraSpec(8, 1), 1)
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    waiting = await journal.submit_step(store, model, 1)
    assert await give_up_models(store) == 1
    row = await journal.model_of(store, model)
    assert row.state is ModelState.LOST
    failure = await journal.error_of(store, waiting)
    assert failure.category == "server"
    assert failure.message == row.state_reason
    assert f"tinker://{model}/weights/0007" in failure.message


async def test_a_model_without_checkpoint_says_so(store: Store) -> None:
    model = await ready_model(store)
    await give_up_models(store)
    assert "no checkpoint" in ((await journal.model_of(store, model)).state_reason or "")


async def test_creations_and_what_waits_for_them_are_left_for_the_new_engine(store: Store) -> None:
    lost = await ready_model(store)
    await journal.submit_step(store, lost, 1)
    creation = await journal.submit_create(store, await journal.new_session(store))
    assert creation.model_id is not None
    step = await journal.submit_step(store, creation.model_id, 1)
    assert await give_up_models(store) == 1
    assert (await journal.model_of(store, creation.model_id)).state is ModelState.CREATING
    cursor = await first_unread(store)
    with store.read() as conn:
        rows = queue.queued_after(conn, cursor)
    left = [row.request_id for row in rows if row.status is FutureStatus.PENDING]
    assert left == [creation.request_id, step.request_id]


def test_what_was_half_written_goes_whoever_wrote_it(tmp_path: Path) -> None:
    for name in (".v3.partial", "..v4.partial.tmp", ".0007.1a2b.tmp", "0007", "v2"):
        (tmp_path / name).mkdir()
    sweep_partial([tmp_path, tmp_path / "absent"])
    assert {path.name for path in tmp_path.iterdir()} == {"0007", "v2"}
