"""Snapshots that are being stored while the ranks die, models end, or a base model stops, or fetched."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_tinker.domain.ids import ModelId, ModelKey
from skyrl_tinker.engine.trainer import trainer_driver
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from skyrl_tinker.system.off_loop import LOAD_THREADS, in_load_thread
from tests.engine.saves.test_captured_room import HangingStorage
from tests.engine.support import journal
from tests.engine.support.world import MakeWorld, World
from tests.engine.trainer.test_replay import (
    expected,
    snapshot_of,
    steps_of,
    train,
    train_busily,
    with_snapshot,
)
from tests.support.waiting import holding

DEAD = TrainerError("rank 0 died")


@pytest.fixture
def hanging() -> HangingStorage:
    return HangingStorage()


@pytest.fixture
async def stored(make_world: MakeWorld, hanging: HangingStorage) -> AsyncIterator[World]:
    """A world in which the storage of snapshots has nothing yet, and answers at once."""
    hanging.back.set()
    world = make_world()
    world.driver._snapshots._storage = hanging
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    yield world
    hanging.back.set()


async def storing(world: World, hanging: HangingStorage, model: ModelId, seq_id: int) -> None:
    """Have a model train two steps from this seq_id on, and a snapshot of it that is being stored."""
    world.patch.setattr(trainer_driver, "IDLE_S", 60.0)
    await train_busily(world, model, seq_id, 2)
    before = len(hanging.asked)
    hanging.back.clear()
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    world.driver.wake()
    await world.until(lambda: len(hanging.asked) > before)
    world.patch.setattr(trainer_driver, "IDLE_S", 60.0)


async def stored_all(world: World) -> None:
    """Wait until nothing is being stored."""
    await world.until(lambda: all(task.done() for task in world.driver._snapshots._writing.values()))


async def test_a_recovery_waits_for_no_upload_and_what_is_stored_then_counts(
    stored: World, hanging: HangingStorage
) -> None:
    model = await stored.model()
    await storing(stored, hanging, model, 1)
    stored.workers.broken = DEAD
    await train(stored, model, 7, 1)
    assert stored.workers.restarts == 1
    assert await steps_of(stored, model) == expected(1, 3)
    assert await snapshot_of(stored, model) is None
    hanging.back.set()
    row = await stored.until(lambda: snapshot_of(stored, model), lambda row: row is not None)
    assert row.seq_id == 6
    after = stored.new_engine()
    await train(after, model, 10, 1)
    assert await steps_of(after, model) == expected(1, 4)
    names = after.workers.names()
    assert names[:2] == ["create", "load"]
    assert names.count("step") == 2  # one is replayed, one is new


async def test_what_was_stored_after_a_replay_is_not_stored_again(
    stored: World, hanging: HangingStorage
) -> None:
    """The replay counts the model's work anew, though the snapshot has it."""
    model = await stored.model()
    await storing(stored, hanging, model, 1)
    stored.ready = False
    stored.workers.broken = DEAD
    stored.driver.wake()
    await stored.until(lambda: stored.ready)
    assert stored.driver._snapshots.work.replay_seconds > 0
    hanging.back.set()
    await stored.until(lambda: stored.driver._snapshots.taken)
    assert stored.driver._snapshots.work.replay_seconds == 0


@pytest.mark.parametrize("replays", [False, True])
async def test_work_whose_snapshot_could_not_be_stored_counts_once(
    stored: World, hanging: HangingStorage, *, replays: bool
) -> None:
    def fails(directory: Path) -> None:
        HangingStorage.store(hanging, directory)
        raise OSError("no route to host")

    stored.patch.setattr(hanging, "store", fails)
    model = await stored.model()
    await storing(stored, hanging, model, 1)
    stored.ready = not replays
    if replays:
        stored.workers.broken = DEAD
        stored.driver.wake()
    await stored.until(lambda: stored.ready)
    hanging.back.set()
    await stored_all(stored)
    (work,) = stored.driver._snapshots.work.by_model.values()
    assert work.requests == 6
    assert not list((stored.root.parent / "snapshots").glob("*/*"))


async def test_an_upload_that_ends_during_a_replay_takes_nothing_from_it(
    stored: World, hanging: HangingStorage
) -> None:
    """The replay has read the older snapshot, which is then to be loaded."""
    model, older = await with_snapshot(stored)
    sampled, keep = asyncio.Event(), stored.driver._snapshots._keep_sampled

    async def kept(key: ModelKey) -> None:
        await keep(key)
        sampled.set()

    await storing(stored, hanging, model, 7)
    stored.patch.setattr(stored.driver._snapshots, "_keep_sampled", kept)
    stored.workers.go_on.clear()
    created = stored.workers.names().count("create")
    stored.workers.broken = DEAD
    stored.driver.wake()
    await stored.until(lambda: stored.workers.names().count("create") > created)
    hanging.back.set()
    await sampled.wait()
    for _ in range(5):  # in which it would be recorded, and the older one removed
        await stored.store.write(lambda conn: None)
    await asyncio.wait(stored.driver._snapshots._writing.values(), timeout=0.1)
    assert older.is_dir()
    stored.workers.go_on.set()
    await train(stored, model, 13, 1)
    assert await steps_of(stored, model) == expected(1, 5)
    row = await stored.until(
        lambda: snapshot_of(stored, model), lambda row: row is not None and row.seq_id == 12
    )
    await stored.until(lambda: not older.exists())
    assert [path.name for path in older.parent.glob("*")] == [Path(row.directory).name]


async def test_a_model_that_ends_while_its_snapshot_is_stored_leaves_nothing_and_delays_no_other(
    stored: World, hanging: HangingStorage
) -> None:
    (other, others), (model, _) = await with_snapshot(stored), await with_snapshot(stored)
    await storing(stored, hanging, model, 7)
    key = await journal.key_of(stored.store, model)
    stored.driver.requests.release(key)
    stored.driver.wake()
    own = stored.root.parent / "snapshots" / str(key)
    await stored.until(lambda: journal.model_of(stored.store, model), lambda row: row.state == "released")
    stored.driver.requests.release(await journal.key_of(stored.store, other))
    stored.driver.wake()
    await stored.until(lambda: not others.exists())
    hanging.back.set()
    await stored_all(stored)
    await stored.until(lambda: not own.exists())
    assert await snapshot_of(stored, model) is None


async def test_a_base_model_stops_while_snapshots_are_stored_which_then_count(
    stored: World, hanging: HangingStorage
) -> None:
    stopped, again = asyncio.Event(), asyncio.Event()

    async def stop() -> None:
        await stored.driver.settle()
        stored.workers.broken = TrainerError("they have been ended")
        stopped.set()
        await again.wait()

    model = await stored.model()
    await storing(stored, hanging, model, 1)
    stored.lost = stop
    stored.may_end = True
    stored.driver.wake()
    await stopped.wait()
    hanging.back.set()
    await stored.until(lambda: snapshot_of(stored, model), lambda row: row is not None)
    stored.may_end = False
    again.set()
    steps = stored.workers.names().count("step")
    await train(stored, model, 7, 1)
    assert await steps_of(stored, model) == expected(1, 3)
    assert stored.workers.names().count("step") == steps + 1, "nothing was replayed"


async def test_a_model_comes_back_however_much_clients_load_and_export(world: World) -> None:
    """As after a take-over by another host."""
    storage = CheckpointStorage(world.root.parent / "snapshots", f"file://{world.root.parent}/bucket")
    world.driver._snapshots._storage = storage
    model, snapshot = await with_snapshot(world)
    after = world.new_engine()
    after.driver._snapshots._storage = storage
    shutil.rmtree(snapshot)
    go_on = threading.Event()
    loads = [asyncio.create_task(in_load_thread(go_on.wait)) for _ in range(LOAD_THREADS)]
    async with holding(go_on, loads):
        await train(after, model, 7, 1)
        assert not any(each.done() for each in loads)
    assert await steps_of(after, model) == expected(1, 3)
