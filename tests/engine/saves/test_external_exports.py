"""Exports: written while the model trains on, in turn with its other saves. The workers are scripted."""

import errno
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import orjson
import pyrage
import pytest

from skyrl_tinker.domain.ids import ALL_OWNERS, CheckpointKind, FutureStatus, ModelId, ModelKey, RequestKind
from skyrl_tinker.domain.manifest import FILE_NAME, read_manifest, verify_files
from skyrl_tinker.domain.peft_config import ADAPTER_FILE
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.recovery import leftovers
from skyrl_tinker.engine.saves import external_exports
from skyrl_tinker.engine.saves.external_exports import Export, complete_export, finish_export
from skyrl_tinker.errors import StorageError, TrainerError
from skyrl_tinker.protocol import age_encryption
from skyrl_tinker.protocol.stored_requests import SaveExternalBody, SaveWeightsBody
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.system.off_loop import LOAD_THREADS, TRANSFER_THREADS, in_load_thread
from tests.engine.support import journal
from tests.engine.support.world import FACTS, World
from tests.support.reads import reading
from tests.support.scripted_trainer import CapturedExport
from tests.support.waiting import hold, holding, until

EXTERNAL = CheckpointKind.EXTERNAL_WEIGHTS


async def export(world: World, model: ModelId, seq_id: int, ttl_seconds: int | None = None) -> Accepted:
    body = SaveExternalBody("a", ttl_seconds).to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.SAVE_WEIGHTS_EXTERNAL, body)


async def save(world: World, model: ModelId, seq_id: int) -> Accepted:
    body = SaveWeightsBody("a").to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.SAVE_WEIGHTS, body)


async def found(world: World, model: ModelId) -> CheckpointRow | None:
    with reading(world.store) as conn:
        return checkpoint_records.find(conn, ALL_OWNERS, model, EXTERNAL, "a")


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
    go_on = threading.Event()
    finish = external_exports.finish_export
    world.patch.setattr(external_exports, "finish_export", lambda *args: go_on.wait() and finish(*args))
    async with holding(go_on):
        exported = [await export(world, await world.model(), 1) for _ in range(TRANSFER_THREADS)]
        assert (await world.done(await save(world, await world.model(), 1))).status is FutureStatus.DONE
    for each in exported:
        assert (await world.done(each)).status is FutureStatus.DONE


class HeldEnds:
    """Ends of exports, which wait for `go_on`; `full` of them find no room on the disk."""

    def __init__(self, world: World, full: int = 0) -> None:
        self.begun = 0
        self.go_on = threading.Event()
        self._full = full
        self._finish = external_exports.finish_export
        world.patch.setattr(external_exports, "finish_export", self)
        world.patch.setattr(outbox, "RETRY_S", 0.01)

    def __call__(self, *args: Any) -> int:
        self.begun += 1
        number = self.begun
        self.go_on.wait()
        if number <= self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._finish(*args)


async def test_however_much_one_owner_exports_a_load_finds_a_thread(world: World) -> None:
    held = HeldEnds(world)
    async with holding(held.go_on):
        exported = [await export(world, await world.model(), 1) for _ in range(LOAD_THREADS)]
        await world.until(lambda: world.workers.names().count("persist") == LOAD_THREADS)
        await world.until(lambda: held.begun)
        assert await in_load_thread(lambda: 7) == 7
        assert held.begun == 1
    for each in exported:
        assert (await world.done(each)).status is FutureStatus.DONE


@pytest.mark.parametrize("full", [0, 2])
async def test_ranks_that_die_come_back_though_an_export_is_not_finished(world: World, full: int) -> None:
    """As where it is encrypted, or the disk is full: they are needed no more, whatever becomes of its end."""
    held = HeldEnds(world, full)
    model, other = await world.model(), await world.model()
    exported = await export(world, model, 1)
    await world.until(lambda: held.begun)
    assert world.workers.held == []
    world.workers.broken = TrainerError("rank 0 died")
    async with holding(held.go_on):
        for each, seq_id in ((other, 1), (model, 2)):
            step = await journal.submit_step(world.store, each, seq_id)
            assert (await world.done(step)).status is FutureStatus.DONE
        assert world.workers.restarts == 1
    assert (await world.done(exported)).status is FutureStatus.DONE
    assert held.begun == 1 + full
    assert [world.workers.names().count(what) for what in ("export", "persist")] == [1, 1]
    row = await found(world, model)
    assert row is not None
    assert left(world) == [Path(row.directory)]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_once(patch: pytest.MonkeyPatch, of: Any, name: str, call: int) -> None:
    """Have a call of a function find no room on the disk."""
    original, calls = getattr(of, name), itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise FULL
        return original(*args, **kwargs)

    patch.setattr(of, name, called)


def decrypted(directory: Path, identity: pyrage.x25519.Identity) -> dict[str, bytes]:
    """Content of an encrypted export, which is whole, by the names of the plain files."""
    listed = read_manifest(directory)
    verify_files(directory, listed, listed.files)
    assert {file.name for file in directory.iterdir()} == {*listed.files, FILE_NAME}
    read = {file: pyrage.decrypt((directory / file).read_bytes(), [identity]) for file in listed.files}
    return {file.removesuffix(".age"): text for file, text in read.items()}


@pytest.mark.parametrize(
    ("of", "name", "call"),
    [
        (Path, "open", 4),  # of the second file that is encrypted
        (Path, "rename", 2),
        (Path, "unlink", 2),
        (external_exports, "_write_manifest", 1),
        (external_exports, "publish", 1),
    ],
)
def test_an_encrypted_export_is_finished_by_another_try_wherever_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Any, name: str, call: int
) -> None:
    """As on a full disk: nothing is encrypted twice, and no part of a file is published."""
    identity = pyrage.x25519.Identity.generate()
    what = Export(FACTS, LoraSpec(8, 1), "float32", [str(identity.to_public())])
    staging, directory = tmp_path / "staging", tmp_path / "directory"
    staging.mkdir()
    CapturedExport(ModelKey(1), [], 0, [], lambda _: None).write(staging)
    written = complete_export(what, staging)
    plain = {file.name: file.read_bytes() for file in staging.iterdir() if file.name != FILE_NAME}
    with monkeypatch.context() as patch:
        fail_once(patch, of, name, call)
        with pytest.raises(OSError, match="No space left") as full:
            finish_export(what, written, staging, directory)
        assert full.value.errno == errno.ENOSPC
        size = finish_export(what, written, staging, directory)
    assert size == sum(entry.size for entry in read_manifest(directory).files.values())
    assert decrypted(directory, identity) == plain


async def test_an_export_that_a_stop_cuts_off_while_it_is_encrypted_ends_right_after_the_next_start(
    world: World,
) -> None:
    """Even if the old engine's thread goes on: each try has a directory of its own."""
    identity, go_on = pyrage.x25519.Identity.generate(), threading.Event()
    begun: list[Any] = hold(  # once one file is encrypted, another is not
        world.patch, age_encryption, "encrypt", go_on, only=lambda *_: len(begun) == 2
    )
    model = await world.model()
    body = SaveExternalBody("a", None, [str(identity.to_public())]).to_bytes()
    exported = await journal.submit(world.store, model, 1, RequestKind.SAVE_WEIGHTS_EXTERNAL, body)
    await world.until(lambda: len(begun) == 2)
    (half,) = left(world)
    assert len(list(half.glob("*.age"))) == 1
    after = world.new_engine()
    async with holding(go_on):
        assert (await after.done(exported)).status is FutureStatus.DONE
    row = await found(after, model)
    assert row is not None
    assert decrypted(Path(row.directory), identity)[ADAPTER_FILE] == b"weights"
    await until(lambda: not half.exists())  # published by the old thread, though nobody waits for it
    saves = leftovers.list_saves(world.root)
    abandoned = await world.store.write(lambda conn: leftovers.list_abandoned(conn, saves))
    assert {*left(world)} - {*abandoned} == {Path(row.directory)}


async def test_a_save_waits_for_the_export_before_it(world: World) -> None:
    """One copy of a model at a time is in the host's memory."""
    model = await world.model()
    world.workers.disk.clear()
    exported, saved = await export(world, model, 1), await save(world, model, 2)
    await world.until(world.workers.names, lambda names: "persist" in names)
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
