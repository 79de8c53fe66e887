"""Saves: the model trains on while they are written, and what else may come meanwhile."""

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import OperationalError

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelId, ModelKey, ModelState, RequestKind
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.upkeep.cleanup import Cleanup
from skyrl_tinker.errors import DiskFullError, StorageAwayError, StorageError, TrainerError
from skyrl_tinker.protocol.stored_requests import (
    CreateViaLoadBody,
    LoadWeightsBody,
    SaveSamplerBody,
    SaveWeightsBody,
)
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.database.group_commit import Op, T
from skyrl_tinker.store.database.tables import Model, Session
from skyrl_tinker.store.futures import training_submission
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.training_submission import Creation
from skyrl_tinker.store.model_records import NewModel
from tests.engine.support import journal
from tests.engine.support.world import MakeWorld, World
from tests.support.failures import failing_first
from tests.support.reads import reading

WEIGHTS = CheckpointKind.WEIGHTS


async def _save_for_sampler(world: World, model: ModelId, seq_id: int) -> Accepted:
    body = SaveSamplerBody(name="a").to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER, body)


async def _save(world: World, model: ModelId, seq_id: int, *, overwrite: bool = False) -> Accepted:
    body = SaveWeightsBody("a", overwrite=overwrite).to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.SAVE_WEIGHTS, body)


async def _load(world: World, model: ModelId, seq_id: int, saved: ModelId) -> Accepted:
    body = LoadWeightsBody(f"tinker://{saved}/weights/a", optimizer=False).to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.LOAD_WEIGHTS, body)


async def _told(world: World, what: str, times: int = 1) -> None:
    await world.until(world.workers.names, lambda names: names.count(what) >= times)


async def _found(world: World, model: ModelId) -> CheckpointRow | None:
    return await world.store.read(lambda conn: checkpoint_records.find(conn, None, model, WEIGHTS, "a"))


async def _status(world: World, accepted: Accepted) -> FutureStatus:
    return (await journal.outcome(world.store, accepted)).status


def _directories(world: World) -> list[str]:
    return sorted(path.name for path in world.root.glob("*/*/*"))


async def test_no_save_touches_what_another_server_writes_for_the_same_request(
    world: World, make_world: MakeWorld
) -> None:
    """One that was taken over may stand still in the middle of a save, and go on."""
    model = await world.model()
    world.workers.disk.clear()
    saved = await _save(world, model, 1)
    await _told(world, "persist")
    successor = make_world(world.root)  # replays the save
    assert (await successor.done(saved)).status is FutureStatus.DONE
    world.workers.disk.set()
    await world.until(lambda: not world.workers.held)
    row = await _found(world, model)
    assert row is not None
    assert Path(row.directory).name in _directories(world)


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_save_whose_commit_was_taken_for_failed_keeps_its_files(
    world: World, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    model, write = await world.model(), world.store.write
    doubts = [OperationalError("COMMIT", None, OSError("the answer was lost"))]

    async def doubtful(op: Op[T], then: Callable[[], None] | None = None, size: int = 0) -> T:
        value = await write(op, then, size)
        if doubts and await _found(world, model):
            raise doubts.pop()
        return value

    monkeypatch.setattr(world.store, "write", doubtful)
    monkeypatch.setattr(outbox, "RETRY_S", 0.01)
    saved = await _save(world, model, 1, overwrite=overwrite)
    assert (await world.done(saved)).status is FutureStatus.DONE
    await world.until(lambda: not doubts)
    row = await _found(world, model)
    assert row is not None
    assert Path(row.directory).name in _directories(world)
    with reading(world.store) as conn:
        assert checkpoint_records.list_garbage(conn, time.time()) == []


async def test_a_model_trains_on_while_its_save_is_written_and_is_answered_when_it_is_there(
    world: World,
) -> None:
    model = await world.model()
    world.workers.disk.clear()
    saved = await _save(world, model, 1)
    trained = await journal.submit_pass(world.store, model, 2)
    stepped = await journal.submit_step(world.store, model, 3)
    for each in (trained, stepped):
        assert (await world.done(each)).status is FutureStatus.DONE
    assert await _status(world, saved) is FutureStatus.PENDING
    assert await _found(world, model) is None
    world.workers.disk.set()
    done = await world.done(saved)
    assert orjson.loads(done.body or b"")["path"] == f"tinker://{model}/weights/a"
    row = await _found(world, model)
    assert row is not None
    assert _directories(world) == [Path(row.directory).name]
    written = await asyncio.to_thread(lambda: [file.stat().st_size for file in world.root.glob("*/*/*/*")])
    assert (row.has_optimizer, row.size_bytes) == (True, sum(written))


async def test_a_checkpoint_knows_the_steps_of_its_weights_not_of_the_moment_in_which_it_is_written(
    world: World,
) -> None:
    model, resumed = await world.model(), await world.model()
    await _trained(world, model, 1)
    world.workers.disk.clear()
    saved = await _save(world, model, 3)
    await _trained(world, model, 4)
    world.workers.disk.set()
    assert (await world.done(saved)).status is FutureStatus.DONE
    assert (await world.done(await _load(world, resumed, 1, model))).status is FutureStatus.DONE
    await _trained(world, resumed, 2)
    again = await world.model()
    assert (await world.done(await _save(world, resumed, 4))).status is FutureStatus.DONE
    assert (await world.done(await _load(world, again, 1, resumed))).status is FutureStatus.DONE
    with reading(world.store) as conn:
        query = select(Model.parent, Model.steps_before).where(Model.model_id.in_((resumed, again)))
        told = {row.parent: row.steps_before for row in conn.execute(query)}
    assert told == {model: 1, resumed: 2}


async def _trained(world: World, model: ModelId, seq_id: int) -> None:
    for each in (
        await journal.submit_pass(world.store, model, seq_id),
        await journal.submit_step(world.store, model, seq_id + 1),
    ):
        assert (await world.done(each)).status is FutureStatus.DONE


async def test_saves_and_loads_of_one_model_wait_for_the_one_that_is_written(world: World) -> None:
    model, neighbour = await world.model(), await world.model()
    world.workers.disk.clear()
    first = await _save(world, model, 1)
    again = await _save(world, model, 2, overwrite=True)
    loaded = await _load(world, model, 3, model)
    await _told(world, "persist")
    free = await journal.submit_pass(world.store, neighbour, 1)
    assert (await world.done(free)).status is FutureStatus.DONE  # nobody else waits
    assert world.workers.names().count("capture") == 1
    world.workers.disk.set()
    for each in (first, again, loaded):
        assert (await world.done(each)).status is FutureStatus.DONE
    order = [what for what, _ in world.workers.told if what in ("capture", "persist", "load")]
    assert order == ["capture", "persist", "capture", "persist", "load"]
    (key, directory) = next(value for what, value in world.workers.told if what == "load")
    assert key == await journal.key_of(world.store, model)
    row = await _found(world, model)
    assert row is not None
    assert directory == Path(row.directory).name
    assert _directories(world)[0] != directory, "what was overwritten may still be read"
    assert len(_directories(world)) == 2


async def test_a_second_save_of_the_name_is_refused_when_the_first_is_there(world: World) -> None:
    model = await world.model()
    world.workers.disk.clear()
    first, second = await _save(world, model, 1), await _save(world, model, 2)
    await _told(world, "persist")
    world.workers.disk.set()
    assert (await world.done(first)).status is FutureStatus.DONE
    await world.done(second)
    assert "delete it, or save with overwrite" in (await journal.error_of(world.store, second)).message
    assert world.workers.names().count("capture") == 1


async def test_the_name_of_a_save_that_failed_is_free(world: World) -> None:
    model = await world.model()
    world.workers.failing["persist"] = StorageError("rank 1 could not write the checkpoint: disk full")
    failed = await _save(world, model, 1)
    await world.done(failed)
    error = await journal.error_of(world.store, failed)
    assert error == Failure("rank 1 could not write the checkpoint: disk full", "server")
    world.workers.failing.clear()
    assert (await world.done(await _save(world, model, 2))).status is FutureStatus.DONE
    assert (await world.done(await journal.submit_step(world.store, model, 3))).status is FutureStatus.DONE


async def test_a_save_waits_while_the_disk_is_full_and_everything_else_goes_on(world: World) -> None:
    model, other = await world.model(), await world.model()
    world.workers.failing["persist"] = DiskFullError("rank 0 could not write the checkpoint: disk full")
    saved = await _save(world, model, 1)
    await _told(world, "persist")
    for each, seq_id in ((model, 2), (other, 1)):
        step = await journal.submit_step(world.store, each, seq_id)
        assert (await world.done(step)).status is FutureStatus.DONE
    assert await _found(world, model) is None
    world.workers.failing.clear()
    assert (await world.done(saved)).status is FutureStatus.DONE
    assert world.workers.names().count("capture") == 1, "of the weights as they were at its turn"


async def test_a_save_waits_while_the_storage_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    away = [StorageAwayError("cannot write s3://bucket/1: no route to host")] * 2

    def store(_: Storage, directory: Path) -> None:
        if away and directory.parent.name == WEIGHTS:
            raise away.pop()

    monkeypatch.setattr(Storage, "store", store)
    monkeypatch.setattr(outbox, "AWAY_S", 0.01)
    model = await world.model()
    assert (await world.done(await _save(world, model, 1))).status is FutureStatus.DONE
    assert (away, world.workers.names().count("persist")) == ([], 1)


@pytest.mark.parametrize("kind", [WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS])
async def test_ranks_that_die_come_back_though_a_save_waits_for_the_storage(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: CheckpointKind
) -> None:
    away, tried = True, list[Path]()

    def store(_: Storage, directory: Path) -> None:
        tried.append(directory)
        if away and directory.parent.name == kind:
            raise StorageAwayError("cannot write s3://bucket/1: no route to host")

    monkeypatch.setattr(Storage, "store", store)
    monkeypatch.setattr(outbox, "AWAY_S", 0.01)
    model, other = await world.model(), await world.model()
    saved = await (_save if kind is WEIGHTS else _save_for_sampler)(world, model, 1)
    await world.until(lambda: tried)
    world.workers.broken = TrainerError("rank 0 died")
    for each, seq_id in ((other, 1), (model, 2)):
        step = await journal.submit_step(world.store, each, seq_id)
        assert (await world.done(step)).status is FutureStatus.DONE
    assert world.workers.restarts == 1
    assert (await journal.outcome(world.store, saved)).status is FutureStatus.PENDING
    away = False
    assert (await world.done(saved)).status is FutureStatus.DONE
    assert world.workers.names().count("persist") == 1, "no replay writes it again"


@pytest.mark.parametrize("written", [False, True])
async def test_ranks_that_die_come_back_though_samplers_that_take_from_them_do_not_answer(
    world: World, *, written: bool
) -> None:
    world.samplers.takes_captured = True
    world.samplers.going_on.clear()
    world.workers.disk.clear()
    model = await world.model(LoraSpec(0, 1))
    body = SaveSamplerBody(sampling_session_seq_id=0).to_bytes()
    saved = await journal.submit(world.store, model, 1, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER, body)
    await world.until(lambda: world.samplers.taken == ["ranks, without files"])
    if written:
        world.workers.disk.set()
        assert (await world.done(saved)).status is FutureStatus.DONE
    world.workers.broken = TrainerError("rank 0 died")
    world.workers.disk.set()
    step = await journal.submit_step(world.store, model, 2)
    assert (await world.done(step)).status is FutureStatus.DONE
    assert (await world.done(saved)).status is FutureStatus.DONE
    assert world.workers.restarts == 1
    assert world.workers.names().count("persist") == (1 if written else 2)
    world.samplers.going_on.set()


@pytest.mark.parametrize("ends", [False, True])
async def test_a_load_waits_while_the_disk_is_full_and_other_models_train(world: World, ends: bool) -> None:
    """Whether or not its session ends meanwhile."""
    model, other = await world.model(), await world.model()
    await world.done(await _save(world, model, 1))
    tried: list[object] = []

    def fail(*paths: object) -> None:
        tried.append(paths)
        raise OSError(errno.ENOSPC, "No space left on device")

    with world.patch.context() as full:
        full.setattr(os, "link", fail)
        full.setattr(shutil, "copy2", fail)
        loaded = await _load(world, model, 2, model)
        behind = await journal.submit_step(world.store, model, 3)
        await world.until(lambda: tried)
        if ends:
            world.driver.requests.release(await journal.key_of(world.store, model))
        for seq_id in (1, 2):
            step = await journal.submit_step(world.store, other, seq_id)
            assert (await world.done(step)).status is FutureStatus.DONE
    for each in (loaded, behind):
        assert (await world.done(each)).status is FutureStatus.DONE
    order = [what for what, _ in world.workers.told if what in ("load", "step")]
    assert order == ["step", "step", "load", "step"]


async def test_another_model_is_told_that_what_it_loads_is_still_being_written(world: World) -> None:
    model, other = await world.model(), await world.model()
    world.workers.disk.clear()
    saved = await _save(world, model, 1)
    await _told(world, "persist")
    loaded = await _load(world, other, 1, model)
    await world.done(loaded)
    assert "still being written" in (await journal.error_of(world.store, loaded)).message
    world.workers.disk.set()
    await world.done(saved)
    assert (await world.done(await _load(world, other, 2, model))).status is FutureStatus.DONE


async def test_what_another_owner_saved_or_is_saving_is_as_unknown_as_none(world: World) -> None:
    model, other = await world.model(), await world.model()
    world.workers.disk.clear()
    saved = await _save(world, model, 1)
    await _told(world, "persist")
    await _give_away(world, model)
    told = []
    for seq_id in (1, 2):
        loaded = await _load(world, other, seq_id, model)
        await world.done(loaded)
        told.append((await journal.error_of(world.store, loaded)).message)
        world.workers.disk.set()
        await world.done(saved)
    path = f"tinker://{model}/weights/a"
    (message,) = set(told)
    assert message.startswith(f"not found: no checkpoint {path}: it was never saved, it is deleted")


async def _give_away(world: World, model: ModelId) -> None:
    session, _, _ = model.partition(":")
    given = update(Session).where(Session.session_id == session).values(owner_id=7)
    await world.store.write(lambda conn: conn.execute(given))


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_delete_meanwhile_is_of_what_was_there_before(world: World, overwrite: bool) -> None:
    model = await world.model()
    if overwrite:
        await world.done(await _save(world, model, 1))
    world.workers.disk.clear()
    saved = await _save(world, model, 1 + overwrite, overwrite=overwrite)
    await _told(world, "persist", 1 + overwrite)
    if overwrite:
        before = await _found(world, model)
        assert before is not None
        await world.store.write(lambda conn: checkpoint_records.delete(conn, before))
    assert await _found(world, model) is None
    world.workers.disk.set()
    assert (await world.done(saved)).status is FutureStatus.DONE
    assert await _found(world, model) is not None


@pytest.mark.parametrize("into_new", [True, False])
async def test_what_is_being_loaded_stays_though_it_is_replaced_and_swept(
    world: World, tmp_path: Path, into_new: bool
) -> None:
    model, neighbour = await world.model(), await world.model()
    await world.done(await _save(world, model, 1))
    world.workers.disk.clear()
    replacing = await _save(world, model, 2, overwrite=True)
    await _told(world, "persist", 2)
    world.workers.go_on.clear()
    loading = await (_create_from(world, model) if into_new else _load(world, neighbour, 1, model))
    await _told(world, "create" if into_new else "load", 3 if into_new else 1)
    world.workers.disk.set()
    await world.done(replacing)
    nobody: Any = None
    overflow = TmpfsSpill(tmp_path / "memory", tmp_path / "disk")
    (tmp_path / "memory").mkdir()
    settings = Settings(home=tmp_path)
    versions = EphemeralVersions(world.store, [], nobody, overflow, settings)
    idle: Any = SimpleNamespace(sessions=set)
    keeper = Cleanup(world.store, world.training, idle, world.creation.is_loading, versions, settings)
    await keeper.sweep()
    assert len(_directories(world)) == 2
    world.workers.go_on.set()
    assert (await world.done(loading)).status is FutureStatus.DONE
    await keeper.sweep()
    assert len(_directories(world)) == 1


async def _create_from(world: World, saved: ModelId) -> Accepted:
    new = NewModel(await journal.new_session(world.store), 0, "tiny", LoraSpec(8, 1), {"type": "adamw"}, {})
    path = f"tinker://{saved}/weights/a"
    body = CreateViaLoadBody(path, False, None, {"type": "adamw"}).to_bytes()
    return await world.store.write(
        lambda conn: training_submission.submit_create(
            conn, Creation(RequestKind.LOAD_WEIGHTS, new, b"new", body), owner=None
        )
    )


async def test_a_session_that_ends_meanwhile_has_its_saves_nevertheless(world: World) -> None:
    model = await world.model()
    world.workers.disk.clear()
    saved, waiting = await _save(world, model, 1), await _save(world, model, 2, overwrite=True)
    await _told(world, "persist")
    world.driver.requests.release(await journal.key_of(world.store, model))
    world.workers.disk.set()
    for each in (saved, waiting):
        assert (await world.done(each)).status is FutureStatus.DONE
    state = await world.until(lambda: journal.model_of(world.store, model), _is_released)
    assert state.state is ModelState.RELEASED
    assert world.workers.names()[-1] == "release"


def _is_released(row: Any) -> bool:
    return bool(row.state is ModelState.RELEASED)


async def test_a_database_that_fails_for_a_moment_costs_no_save(world: World) -> None:
    failures = [OperationalError("INSERT", None, OSError("disk I/O error"))]
    world.patch.setattr(checkpoint_records, "add", failing_first(checkpoint_records.add, failures))
    model = await world.model()
    assert (await world.done(await _save(world, model, 1))).status is FutureStatus.DONE
    assert failures == []


async def test_what_cannot_be_recorded_is_logged_and_leaves_no_directory(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged before the directory is deleted: that waits for the database, perhaps until the end."""
    is_recorded, logged = checkpoint_records.is_recorded, [False]

    def look(conn: Connection, model: ModelKey, directory: str) -> bool:
        logged.append("failed unexpectedly" in caplog.text)
        return is_recorded(conn, model, directory)

    monkeypatch.setattr(checkpoint_records, "add", Mock(side_effect=RuntimeError("a bug")))
    monkeypatch.setattr(checkpoint_records, "is_recorded", look)
    model = await world.model()
    saved = await _save(world, model, 1)
    assert (await world.done(saved)).status is FutureStatus.FAILED
    assert "a bug" in (await journal.error_of(world.store, saved)).message
    assert _directories(world) == []
    assert logged[-1]
