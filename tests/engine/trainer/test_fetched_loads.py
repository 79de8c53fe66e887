"""Loads of checkpoints that are in storage: nobody else waits for it, and the load waits while it is away."""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelId, RequestKind
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.recovery import snapshot_keeper
from skyrl_tinker.engine.upkeep.cleanup import storage_steps
from skyrl_tinker.errors import StorageAwayError, TrainerError
from skyrl_tinker.protocol.stored_requests import CreateViaLoadBody, LoadWeightsBody, SaveWeightsBody
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.training_submission import Creation, submit_create
from skyrl_tinker.store.model_records import NewModel
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import LOAD_THREADS
from tests.engine.support import journal
from tests.engine.support.world import World
from tests.support.reads import reading
from tests.support.waiting import holding

DONE = FutureStatus.DONE


class Far:
    """Engine whose checkpoints are in storage. `reads`: wait for it; `away`: storage does not answer."""

    def __init__(self, store: Store, bell: Doorbell, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage = CheckpointStorage(root, f"file://{root.parent}/bucket", pauses_s=())
        self.world = World(store, bell, root, storage=self.storage)
        self.reads = threading.Event()
        self.reads.set()
        self.reading = threading.Event()
        self.away = False
        self._get = self.storage._files.get_file
        monkeypatch.setattr(self.storage._files, "get_file", self._get_file)
        monkeypatch.setattr(outbox, "AWAY_S", 0.01)

    def _get_file(self, place: str, target: str) -> None:
        self.reading.set()
        self.reads.wait()
        if self.away:
            raise OSError("no route to host")
        self._get(place, target)

    async def saved(self) -> ModelId:
        """A model with a checkpoint that is in storage only."""
        world, model = self.world, await self.world.model()
        body = SaveWeightsBody("a").to_bytes()
        await self.done(await journal.submit(world.store, model, 1, RequestKind.SAVE_WEIGHTS, body))
        with reading(world.store) as conn:
            row = checkpoint_records.find(conn, None, model, CheckpointKind.WEIGHTS, "a")
        assert row is not None
        await asyncio.to_thread(shutil.rmtree, row.directory)
        return model

    async def load(self, model: ModelId, seq_id: int, saved: ModelId) -> Accepted:
        body = LoadWeightsBody(f"tinker://{saved}/weights/a", optimizer=False).to_bytes()
        return await journal.submit(self.world.store, model, seq_id, RequestKind.LOAD_WEIGHTS, body)

    async def create_from(self, saved: ModelId) -> Accepted:
        session = await journal.new_session(self.world.store)
        new = NewModel(session, 0, "tiny", LoraSpec(8, 1), {"type": "adamw"}, {})
        body = CreateViaLoadBody(f"tinker://{saved}/weights/a", False, None, {"type": "adamw"}).to_bytes()
        creation = Creation(RequestKind.LOAD_WEIGHTS, new, b"new", body)
        return await self.world.store.write(partial(submit_create, new=creation, owner=None))

    async def done(self, *accepted: Accepted) -> None:
        for each in accepted:
            assert (await self.world.done(each)).status is DONE

    async def step(self, model: ModelId, seq_id: int) -> Accepted:
        return await journal.submit_step(self.world.store, model, seq_id)

    def ran(self, *what: str) -> list[str]:
        return [each for each in self.world.workers.names() if each in what]

    def kept(self) -> list[Path]:
        """What is kept for a later replay, or half so."""
        return list((self.world.root.parent / "snapshots").glob("*/*"))


@pytest.fixture
async def far(
    store: Store, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Far]:
    made = Far(store, bell, tmp_path / "checkpoints", monkeypatch)
    yield made
    made.reads.set()
    await made.world.end()


@pytest.mark.parametrize("into_new", [False, True])
async def test_others_train_while_a_slow_storage_is_read(far: Far, into_new: bool) -> None:
    saved, other = await far.saved(), await far.world.model()
    far.reads.clear()
    loaded = await (far.create_from(saved) if into_new else far.load(saved, 2, saved))
    await far.world.until(far.reading.is_set)
    behind = await far.step(saved, 2 if into_new else 3)
    if into_new:
        await far.done(behind)
    passed = await journal.submit_pass(far.world.store, other, 1)
    await far.done(passed, await far.step(other, 2))
    assert far.ran("load") == []
    assert (await journal.outcome(far.world.store, loaded)).status is FutureStatus.PENDING
    far.reads.set()
    await far.done(loaded, behind)
    assert far.ran("load", "step") == (["step", "step", "load"] if into_new else ["step", "load", "step"])


@pytest.mark.parametrize("into_new", [False, True])
async def test_a_load_waits_while_the_storage_is_away(
    far: Far, into_new: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved = await far.saved()
    far.away = True
    loaded = await (far.create_from(saved) if into_new else far.load(saved, 2, saved))
    await far.world.until(lambda: caplog.text.count("no route to host") > 1)
    far.away = False
    await far.done(loaded)
    assert len(far.kept()) == 1


async def test_a_load_waits_for_room_on_the_host_of_a_rank(far: Far) -> None:
    saved = await far.saved()
    far.world.workers.failing["load"] = StorageAwayError("rank 1 failed in write: no space left")
    loaded = await far.load(saved, 2, saved)
    await far.world.until(lambda: len(far.ran("load")), lambda times: times > 1)
    far.world.workers.failing.clear()
    await far.done(loaded)
    assert len(far.kept()) == 1


async def test_a_load_that_expires_while_it_is_fetched_leaves_nothing(far: Far) -> None:
    saved = await far.saved()
    far.reads.clear()
    loaded = await far.load(saved, 2, saved)
    await far.world.until(far.reading.is_set)
    with reading(far.world.store) as conn:
        row = next(row for row in queue.queued_after(conn, 0) if row.request_id == loaded.request_id)
    await far.world.driver.requests.expire([(row, Failure("it waited too long", "server"))])
    await far.done(await far.step(saved, 3))
    far.reads.set()
    directory = far.world.root / str(row.model_key)
    await far.world.until(lambda: list(directory.glob("weights/a~*")))
    await far.done(await far.step(saved, 4))
    await far.world.until(far.kept, lambda kept: not kept)
    assert far.ran("load") == []
    assert not far.world.creation.is_loading(str(next(directory.glob("weights/a~*"))))


async def test_what_cannot_be_loaded_leaves_nothing(far: Far) -> None:
    saved = await far.saved()
    far.world.workers.failing["load"] = ValueError("it does not fit")
    loaded = await far.load(saved, 2, saved)
    assert (await far.world.done(loaded)).status is FutureStatus.FAILED
    assert far.kept() == []
    unknown = await far.load(saved, 3, ModelId("no-such:model:0"))
    assert (await far.world.done(unknown)).status is FutureStatus.FAILED
    await far.done(await far.step(saved, 4))


async def test_what_was_fetched_outlives_the_ranks(far: Far) -> None:
    """The load is repeated on fresh ones, and is not fetched again."""
    saved, workers = await far.saved(), far.world.workers
    workers.go_on.clear()
    loaded = await far.load(saved, 2, saved)
    await far.world.until(lambda: far.ran("load"))
    far.away = True
    workers.broken = TrainerError("rank 0 died")
    workers.go_on.set()
    await far.done(loaded, await far.step(saved, 3))
    assert (far.ran("load"), workers.restarts, len(far.kept())) == (["load", "load"], 1, 1)


async def test_what_was_fetched_stays_in_the_cache_however_long_its_load_waits(far: Far) -> None:
    saved, is_loading = await far.saved(), far.world.creation.is_loading
    far.world.workers.go_on.clear()
    loaded = await far.load(saved, 2, saved)
    await far.world.until(lambda: far.ran("load"))
    (directory,) = far.world.root.glob("*/weights/a~*")
    os.utime(directory, (0, 0))
    for step in storage_steps(far.world.store, far.storage, 0.0, is_loading):
        await step.run()
    assert directory.exists()
    far.world.workers.go_on.set()
    await far.done(loaded)
    far.storage.evict(0.0, is_loading)
    assert not directory.exists()


async def test_a_load_that_waits_for_its_turn_when_its_session_ends_runs_all_the_same(far: Far) -> None:
    saved, other = await far.saved(), await far.world.model()
    far.world.workers.go_on.clear()
    running = await journal.submit_pass(far.world.store, other, 1)
    await far.world.until(lambda: far.ran("pass"))
    loaded = await far.load(saved, 2, saved)
    await far.world.taken_in()
    far.world.driver.requests.release(await journal.key_of(far.world.store, saved))
    far.world.workers.go_on.set()
    await far.done(running, loaded)


async def test_however_much_one_session_loads_another_one_loads_too(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys each session has a share; with keys each key."""
    store, saved, session = far.world.store, await far.saved(), await journal.new_session(far.world.store)
    created = [await journal.submit_create(store, session, number) for number in range(LOAD_THREADS)]
    await far.done(*created)
    models = [each.model_id for each in created if each.model_id is not None]
    held = {str(await journal.key_of(store, model)) for model in models}
    link, go_on, begun = snapshot_keeper._link_files, threading.Event(), list[Path]()

    def linked(source: Path, target: Path) -> None:
        if target.parent.name in held:
            begun.append(target)
            go_on.wait()
        link(source, target)

    monkeypatch.setattr(snapshot_keeper, "_link_files", linked)
    loads = [await far.load(model, 1, saved) for model in models]
    async with holding(go_on):
        await far.world.until(lambda: len(begun) == LOAD_THREADS // 2)
        await far.done(await far.load(await far.world.model(), 1, saved))
        assert len(begun) == LOAD_THREADS // 2
    await far.done(*loads)
