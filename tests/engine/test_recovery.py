"""After an engine died, every request it left is answered, and models say what became of them."""

from pathlib import Path

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelId, ModelState
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.recovery import recover, sweep_partial
from skyrl_tinker.engine.status import KEY, EngineStatus
from skyrl_tinker.store import checkpoint_records, model_records, server_state
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.doorbell import Doorbell
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


async def newest(store: Store) -> int:
    with store.read() as conn:
        return queue.last_id(conn)


async def test_a_model_of_the_dead_engine_is_lost_and_names_its_last_checkpoint(store: Store) -> None:
    model = await ready_model(store)
    key = await journal.key_of(store, model)
    new = NewCheckpoint(key, CheckpointKind.WEIGHTS, "0007", "/nowhere", "tiny", LoraSpec(8, 1), 1)
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    waiting = await journal.submit_step(store, model, 1)
    assert await recover(store, await newest(store)) == 1
    row = await journal.model_of(store, model)
    assert row.state is ModelState.LOST
    failure = await journal.error_of(store, waiting)
    assert failure.category == "server"
    assert failure.message == row.state_reason
    assert f"tinker://{model}/weights/0007" in failure.message


async def test_a_model_without_checkpoint_says_so(store: Store) -> None:
    model = await ready_model(store)
    await recover(store, await newest(store))
    assert "no checkpoint" in ((await journal.model_of(store, model)).state_reason or "")


async def test_what_came_after_the_death_is_left_for_the_new_engine(store: Store) -> None:
    await ready_model(store)
    died_after = await newest(store)
    late = await journal.submit_create(store, await journal.new_session(store))
    assert late.model_id is not None
    step = await journal.submit_step(store, late.model_id, 1)
    await recover(store, died_after)
    assert (await journal.model_of(store, late.model_id)).state is ModelState.CREATING
    for accepted in (late, step):
        assert (await journal.outcome(store, accepted)).status is FutureStatus.PENDING


async def test_nobody_said_when_it_died_then_all_that_is_there_was_its(store: Store, bell: Doorbell) -> None:
    await ready_model(store)
    assert (EngineStatus.open(store, bell)).died_after == await newest(store)


async def test_the_mark_of_a_death_stays_until_recovery_is_done(store: Store, bell: Doorbell) -> None:
    await store.write(lambda conn: server_state.put(conn, KEY, {"state": "restarting", "died_after": 41}))
    status = EngineStatus.open(store, bell)
    await status.report("starting", "waiting")
    assert (EngineStatus.open(store, bell)).died_after == 41
    status.recovered()
    await status.report("ready", "")
    assert (EngineStatus.open(store, bell)).died_after == 0


def test_what_was_half_written_goes_whoever_wrote_it(tmp_path: Path) -> None:
    for name in (".v3.partial", "..v4.partial.tmp", ".0007.1a2b.tmp", "0007", "v2"):
        (tmp_path / name).mkdir()
    sweep_partial([tmp_path, tmp_path / "absent"])
    assert {path.name for path in tmp_path.iterdir()} == {"0007", "v2"}
