"""Exports: written while the model trains on, in turn with its other saves. The workers are scripted."""

import json
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import orjson
import pytest

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelId, RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.saves import external_exports
from skyrl_tinker.errors import StorageError
from skyrl_tinker.protocol.stored_requests import SaveExternalBody, SaveWeightsBody
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.system.off_loop import TRANSFER_THREADS
from tests.engine.support import journal
from tests.engine.support.world import World
from tests.support.reads import reading

EXTERNAL = CheckpointKind.EXTERNAL_WEIGHTS


async def export(world: World, model: ModelId, seq_id: int, ttl_seconds: int | None = None) -> Accepted:
    body = SaveExternalBody("a", ttl_seconds).to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.SAVE_WEIGHTS_EXTERNAL, body)


async def save(world: World, model: ModelId, seq_id: int) -> Accepted:
    body = SaveWeightsBody("a").to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.SAVE_WEIGHTS, body)


async def found(world: World, model: ModelId) -> CheckpointRow | None:
    with reading(world.store) as conn:
        return checkpoint_records.find_of_any_owner(conn, model, EXTERNAL, "a")


def left(world: World) -> list[Path]:
    """Directories of exports, whatever became of them."""
    return list(world.root.glob("*/external_weights/*"))


async def test_a_model_trains_on_while_its_export_is_written(world: World) -> None:
    model = await world.model()
    world.workers.disk.clear()
    exported = await export(world, model, 1, ttl_seconds=3600)
    stepped = await journal.submit_step(world.store, model, 2)
    assert (await world.done(stepped)).status is FutureStatus.DONE
    assert await found(world, model) is None
    world.workers.disk.set()
    answer = orjson.loads((await world.done(exported)).body or b"")
    row = await found(world, model)
    assert row is not None
    config = json.loads((Path(row.directory) / "adapter_config.json").read_text())
    assert config == {"base_model_name_or_path": "tiny"}
    beside = ("adapter_config.json", "MERGING.md")
    size = len(b"weights") + sum((Path(row.directory) / name).stat().st_size for name in beside)
    path = f"tinker://{model}/external_weights/a"
    assert answer == {"path": path, "size_bytes": size, "type": "save_weights_external"}
    assert row.size_bytes == size
    assert row.expires_at == pytest.approx(time.time() + 3600, abs=600)
    assert left(world) == [Path(row.directory)]


async def test_however_much_is_exported_a_save_is_stored(world: World) -> None:
    go_on, exported = threading.Event(), list[Accepted]()
    finish = external_exports.finish_export
    world.patch.setattr(external_exports, "finish_export", lambda *args: go_on.wait() and finish(*args))
    try:
        exported = [await export(world, await world.model(), 1) for _ in range(TRANSFER_THREADS)]
        assert (await world.done(await save(world, await world.model(), 1))).status is FutureStatus.DONE
    finally:
        go_on.set()
    for each in exported:
        assert (await world.done(each)).status is FutureStatus.DONE


async def test_a_save_waits_for_the_export_before_it(world: World) -> None:
    """One copy of a model at a time is in the host's memory."""
    model = await world.model()
    world.workers.disk.clear()
    exported, saved = await export(world, model, 1), await save(world, model, 2)

    async def names() -> list[str]:
        return world.workers.names()

    await world.until(names, lambda names: "persist" in names)
    world.workers.disk.set()
    for each in (exported, saved):
        assert (await world.done(each)).status is FutureStatus.DONE
    told = [what for what in world.workers.names() if what in ("export", "capture", "persist")]
    assert told == ["export", "persist", "capture", "persist"]


async def test_a_taken_name_is_the_users_failure(world: World) -> None:
    model = await world.model()
    await world.done(await export(world, model, 1))
    again = await export(world, model, 2)
    await world.done(again)
    path = f"tinker://{model}/external_weights/a"
    expected = f"checkpoint {path} exists: choose another name or delete it"
    assert await journal.error_of(world.store, again) == Failure(expected, "user")
    assert world.workers.names().count("export") == 1


async def test_an_export_that_cannot_be_written_leaves_nothing_and_its_name_free(world: World) -> None:
    model = await world.model()
    world.workers.failing["persist"] = StorageError("rank 0 could not write the checkpoint: disk full")
    failed = await export(world, model, 1)
    await world.done(failed)
    assert (await journal.error_of(world.store, failed)).category == "server"
    assert left(world) == []
    world.workers.failing.clear()
    assert (await world.done(await export(world, model, 2))).status is FutureStatus.DONE


async def test_an_export_that_cannot_be_recorded_leaves_nothing(world: World) -> None:
    model = await world.model()
    with world.patch.context() as broken:
        broken.setattr(checkpoint_records, "add", Mock(side_effect=RuntimeError("a bug")))
        failed = await export(world, model, 1)
        await world.done(failed)
    assert "a bug" in (await journal.error_of(world.store, failed)).message
    assert left(world) == []
    assert (await world.done(await export(world, model, 2))).status is FutureStatus.DONE
