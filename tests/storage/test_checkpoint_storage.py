"""Checkpoints in storage: on S3, and on any file system of fsspec."""

import asyncio
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from skyrl_tinker.config import load
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.manifest import FILE_NAME, Manifest, entry_of, write_manifest
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.outbox import when_possible
from skyrl_tinker.errors import StartupError, StorageError
from skyrl_tinker.server import preflight
from skyrl_tinker.storage import checkpoint_storage, owner_mark
from skyrl_tinker.storage.checkpoint_storage import UNUSED_S, CheckpointStorage
from skyrl_tinker.storage.owner_mark import LocalPlace
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.system.off_loop import (
    DISK_THREADS,
    LOAD_THREADS,
    TRANSFER_THREADS,
    in_disk_thread,
    in_load_thread,
    in_transfer_thread,
)
from tests.support.object_storage import BUCKET, ObjectStorage, object_storage
from tests.support.waiting import hold, holding, until

FILES = {"adapter_model.safetensors": b"weights" * 1000, "adapter_config.json": b"{}"}


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStorage]:
    with object_storage() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # boto pauses longer than the storage's own tries
        yield server


@pytest.fixture(params=["s3", "file"])
def storage(request: pytest.FixtureRequest, s3: ObjectStorage, tmp_path: Path) -> CheckpointStorage:
    (tmp_path / "elsewhere").mkdir()
    url = f"s3://{BUCKET}/{tmp_path.name}" if request.param == "s3" else f"file://{tmp_path}/elsewhere"
    return CheckpointStorage(tmp_path / "local", url, pauses_s=(0.0, 0.0))


def write(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    entries = {name: entry_of(directory / name) for name in FILES}
    write_manifest(directory, Manifest("/base", LoraSpec(8, 1), 3, None, entries))
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture
def on_disk(tmp_path: Path) -> CheckpointStorage:
    return CheckpointStorage(tmp_path / "local", f"file://{tmp_path}/elsewhere")


def only_stored(storage: CheckpointStorage, *names: str) -> list[Path]:
    """Store directories, and remove them here."""
    directories = [write(storage._root / name) for name in names]
    for directory in directories:
        storage.store(directory)
        shutil.rmtree(directory)
    return directories


def test_what_is_stored_comes_back_and_is_removed(storage: CheckpointStorage, tmp_path: Path) -> None:
    storage.probe()
    directory = write(tmp_path / "local" / "1" / "weights" / "kept~3")
    before = content(directory)
    storage.store(directory)
    storage.fetch(directory)  # it is here
    shutil.rmtree(directory)
    storage.fetch(directory)
    assert content(directory) == before
    storage.remove(directory)
    storage.remove(directory)
    shutil.rmtree(directory)
    storage.fetch(directory)
    assert not directory.exists()


def test_what_lies_elsewhere_is_none_of_its_business(storage: CheckpointStorage, tmp_path: Path) -> None:
    """As a checkpoint of a server that had another directory before it had storage."""
    before = write(tmp_path / "mnt" / "1" / "weights" / "kept~3")
    assert not storage.has(before)
    storage.remove(before)
    storage.discard(before)
    linked = write(tmp_path / "local" / "1" / "weights" / "loaded~4")
    storage.store_copy(linked, before, storage)
    assert storage.has(linked)


def test_without_its_manifest_a_checkpoint_is_not_there(s3: ObjectStorage, tmp_path: Path) -> None:
    """As of a host that died while it stored it, or removed it."""
    storage = CheckpointStorage(tmp_path / "local", f"s3://{BUCKET}/half")
    directory = write(tmp_path / "local" / "1")
    storage.store(directory)
    s3.client().delete_object(Bucket=BUCKET, Key=f"half/1/{FILE_NAME}")
    assert s3.keys("half/") == {f"half/1/{name}" for name in FILES}
    shutil.rmtree(directory)
    storage.fetch(directory)
    assert not directory.exists()
    storage.remove(directory)
    assert s3.keys("half/") == set()


def test_a_file_is_read_where_it_is(storage: CheckpointStorage, tmp_path: Path) -> None:
    directory = write(tmp_path / "local" / "1")
    weights = FILES["adapter_model.safetensors"]
    storage.store(directory)
    for _ in ("here", "in storage"):
        with storage.open(directory, "adapter_model.safetensors") as file:
            assert file.read(10) == weights[:10]
            assert file.seek(5000) == 5000
            assert file.read(10) == weights[5000:5010]
            assert file.read() == weights[5010:]
            assert file.read(10) == b""
            assert file.seek(0, os.SEEK_END) == len(weights)
        with pytest.raises(FileNotFoundError):
            storage.open(directory, "no such file")
        shutil.rmtree(directory, ignore_errors=True)
    assert not directory.exists()
    elsewhere = write(tmp_path / "from before it was used")
    with storage.open(elsewhere, "adapter_config.json") as file:
        assert file.read() == FILES["adapter_config.json"]


def test_a_fetch_goes_on_where_it_was_cut_and_damage_is_refused(s3: ObjectStorage, tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "local", f"s3://{BUCKET}/cut")
    directory = write(tmp_path / "local" / "1")
    before = content(directory)
    storage.store(directory)
    shutil.rmtree(directory)
    key = "cut/1/adapter_model.safetensors"
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=b"other")
    with pytest.raises(StorageError, match=f"s3://{BUCKET}/{key} is damaged: expected .*, found "):
        storage.fetch(directory)
    assert not directory.exists()
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=FILES["adapter_model.safetensors"])
    s3.client().delete_object(Bucket=BUCKET, Key="cut/1/adapter_config.json")  # fetched whole before
    storage.fetch(directory)
    assert content(directory) == before


def test_one_that_is_down_is_named_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: ObjectStorage
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    storage = CheckpointStorage(tmp_path / "local", f"s3://{BUCKET}/a", pauses_s=(0.0,))
    with pytest.raises(StorageError, match=rf"^cannot write s3://{BUCKET}/a/1/adapter_\S+: .*127.0.0.1:9"):
        storage.store(write(tmp_path / "local" / "1"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s3://no-such-bucket/x",
            "--checkpoints s3://no-such-bucket/x: cannot write, read and delete a file below s3://no-such-bucket/x",
        ),
        (
            "nothing://here",
            "--checkpoints nothing://here: Protocol not known: nothing; expected a directory or a URL",
        ),
    ],
)
def test_storage_that_cannot_be_written_to_is_refused_at_the_start(
    url: str, message: str, s3: ObjectStorage, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=f"^{message}"):
        preflight.check_storage(load(home=tmp_path, checkpoints=url))
    preflight.check_storage(load(home=tmp_path, checkpoints=f"s3://{BUCKET}/x"))


def test_storage_of_another_database_is_refused(
    s3: ObjectStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its models have the same numbers, and so the same places."""
    url = f"s3://{BUCKET}/owned"
    first = load(home=tmp_path / "first", checkpoints=url)
    second = load(home=tmp_path / "second", snapshots=url)
    for settings in (first, second):
        Directories(settings).make()
        migrate(settings.store_url)
    for _ in range(2):  # starts
        preflight.claim_storage(first)
    assert "conditional writes" not in caplog.text
    with pytest.raises(StartupError, match=f"^--snapshots {url}: found the files of another database"):
        preflight.claim_storage(second)
    preflight.claim_storage(second.model_copy(update={"snapshots": f"{url}/other"}))


@pytest.mark.parametrize("kind", ["s3", "file", "directory", "empty mark"])
def test_of_two_that_claim_a_place_at_once_one_owns_it(kind: str, s3: ObjectStorage, tmp_path: Path) -> None:
    """Both have found no mark, or that of a server which died writing, before the first writes its own."""
    url = f"s3://{BUCKET}/at-once" if kind == "s3" else f"file://{tmp_path}"
    local = kind in ("directory", "empty mark")
    place = LocalPlace(tmp_path) if local else CheckpointStorage(tmp_path, url, pauses_s=())
    if kind == "empty mark":
        (tmp_path / owner_mark.FILE_NAME).touch()

    def claimed_by_the_other() -> bool:
        owner_mark.claim(place, "first", lambda: False)
        return False

    with pytest.raises(StorageError, match="found the files of another database"):
        owner_mark.claim(place, "second", claimed_by_the_other)
    assert place.read_mark() == "first"
    owner_mark.claim(place, "first", lambda: True)


def test_a_mark_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, lock, waits = LocalPlace(tmp_path), fcntl.flock, threading.Event()

    def noted(*arguments: Any) -> None:
        waits.set()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", noted)
    with ThreadPoolExecutor() as pool:
        with (tmp_path / owner_mark.FILE_NAME).open("a") as file:
            lock(file, fcntl.LOCK_EX)
            claimed = pool.submit(owner_mark.claim, place, "second", lambda: False)
            assert waits.wait(60)
            file.write("first")
        with pytest.raises(StorageError, match="found the files of another database"):
            claimed.result()


@pytest.mark.parametrize("kind", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EIO])
def test_a_place_is_claimed_where_the_file_system_knows_no_locks(
    kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(kind, os.strerror(kind))))
    if kind == errno.EIO:
        with pytest.raises(StorageError, match="Input/output error"):
            owner_mark.claim(LocalPlace(tmp_path), "first", lambda: False)
        return
    owner_mark.claim(LocalPlace(tmp_path), "first", lambda: False)
    with pytest.raises(StorageError, match="found the files of another database"):
        owner_mark.claim(LocalPlace(tmp_path), "second", lambda: False)


@pytest.mark.parametrize("condition", ["ignored", "not implemented", "kept"])
def test_storage_without_conditional_writes_is_told_of(
    s3: ObjectStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    condition: str,
) -> None:
    """Some S3-compatible servers ignore the condition, answer NotImplemented, or keep it in fewer words."""
    url = f"s3://{BUCKET}/{condition.replace(' ', '-')}"
    storage = CheckpointStorage(tmp_path, url, pauses_s=())
    call = storage._files.call_s3

    def call_s3(method: str, *positional: object, **named: object) -> object:
        if named.get("IfNoneMatch") and condition == "not implemented":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        if condition == "ignored":
            named.pop("IfNoneMatch", None)
        try:
            return call(method, *positional, **named)
        except FileExistsError as error:
            raise OSError(errno.EINVAL, "a condition did not hold") from error

    with monkeypatch.context() as patch:
        patch.setattr(storage._files, "call_s3", call_s3)
        owner_mark.claim(storage, "first", lambda: False)
    assert (f"{url}: this storage has no conditional writes" in caplog.text) == (condition != "kept")
    assert storage.read_mark() == "first"


def test_what_a_dead_host_half_stored_goes_after_a_day(
    s3: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(tmp_path / "local", f"s3://{BUCKET}/left")
    whole, half = (write(tmp_path / "local" / "1" / name) for name in ("whole", "half"))
    storage.store(whole)
    storage.store(half)
    s3.client().delete_object(Bucket=BUCKET, Key=f"left/1/half/{FILE_NAME}")
    s3.client().put_object(Bucket=BUCKET, Key="left/notes/of/mine/a.txt", Body=b"of somebody else")
    storage.discard_old("[0-9]*/*", ())
    assert set(storage.listed("[0-9]*/*")) == {whole, half}
    monkeypatch.setattr(checkpoint_storage, "LEFT_S", -60.0)  # the clocks are two
    storage.discard_old("[0-9]*/*", ())
    assert storage.listed("[0-9]*/*", tmp_path / "local" / "1") == [whole]
    assert "left/notes/of/mine/a.txt" in s3.keys("left/")


def test_the_longest_unused_leave_the_cache_and_come_back(s3: ObjectStorage, tmp_path: Path) -> None:
    """Those used within an hour stay, and those that the storage has not."""
    storage = CheckpointStorage(tmp_path / "local", f"s3://{BUCKET}/cache")
    names = ("unstored", "oldest", "old", "used", "new")
    unstored, oldest, old, used, new = found = [write(tmp_path / "local" / "1" / name) for name in names]
    for age, directory in zip((9, 8, 7, 6, 0), found, strict=True):
        at = time.time() - age * UNUSED_S
        os.utime(directory, (at, at))
        if directory is not unstored:
            storage.store(directory)
    storage.fetch(used)
    size = sum(file.stat().st_size for file in new.iterdir())
    storage.evict(4.5 * size, lambda _: False)
    assert {path for path in found if path.exists()} == {unstored, old, used, new}
    storage.evict(0, lambda _: False)
    assert {path for path in found if path.exists()} == {unstored, used, new}
    storage.fetch(oldest)
    assert content(oldest) == content(new)


async def test_a_fetch_waits_for_no_other_directory_however_many_wait_for_that(
    on_disk: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = only_stored(on_disk, "slow", "quick")
    go_on = threading.Event()
    hold(monkeypatch, on_disk._files, "get_file", go_on, only=lambda place, _: "/slow/" in place)
    waiting = [asyncio.create_task(on_disk.fetch_off_loop(slow)) for _ in range(2 * TRANSFER_THREADS)]
    async with holding(go_on, waiting):
        await on_disk.fetch_off_loop(quick)
        assert not any(each.done() for each in waiting)
    assert content(slow).keys() == {*FILES, FILE_NAME}


async def test_who_joins_a_fetch_holds_no_disk_thread(
    on_disk: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = only_stored(on_disk, *map(str, range(DISK_THREADS)))
    go_on = threading.Event()
    begun = hold(monkeypatch, on_disk._files, "get_file", go_on)
    fetches = [asyncio.create_task(on_disk.fetch_off_loop(each)) for each in directories]
    async with holding(go_on, fetches):
        await until(lambda: len({Path(place).parent for place, _ in begun}) == DISK_THREADS)
        fetches += [asyncio.create_task(on_disk.fetch_off_loop(each)) for each in directories]
        for _ in range(10):  # until each has begun what it does in a thread
            await asyncio.sleep(0)
        assert await in_disk_thread(int) == 0
        assert not any(each.done() for each in fetches)
    assert all(map(Path.exists, directories))


async def test_a_fetch_waits_for_none_of_another_share_also_of_a_directory_that_it_waits_for(
    on_disk: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = only_stored(on_disk, *map(str, range(LOAD_THREADS)))
    go_on = threading.Event()
    begun = hold(monkeypatch, on_disk, "fetch", go_on, only=lambda directory: directory != directories[-1])
    fetches = [asyncio.create_task(on_disk.fetch_off_loop(each, "a")) for each in directories]
    async with holding(go_on, fetches):
        await until(lambda: len(begun) == LOAD_THREADS // 2)
        await on_disk.fetch_off_loop(directories[-1], "b")
        assert len(begun) == LOAD_THREADS // 2 + 1  # of the first share any half: disk threads looked first
        assert begun[-1] == (directories[-1],)
    assert all(map(Path.exists, directories))


@pytest.mark.parametrize("known_s", [60.0, 0.0])
async def test_what_was_fetched_waits_for_no_transfer_until_it_leaves(
    on_disk: CheckpointStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_s: float
) -> None:
    monkeypatch.setattr(checkpoint_storage, "KNOWN_S", known_s)
    evicted, removed = directories = [write(tmp_path / "local" / name) for name in ("evicted", "removed")]
    for directory in directories:
        on_disk.store(directory)
        assert not on_disk._knows(directory)
        await on_disk.fetch_off_loop(directory)
        assert on_disk._knows(directory) == bool(known_s)
    go_on = threading.Event()
    transfers = [asyncio.create_task(in_load_thread(go_on.wait)) for _ in range(2 * LOAD_THREADS)]
    async with holding(go_on, transfers):
        for directory in directories:
            await on_disk.fetch_off_loop(directory)
    os.utime(evicted, (0, 0))
    on_disk.evict(0, lambda _: False)
    on_disk.remove(removed)
    assert not any(map(on_disk._knows, directories))
    await on_disk.fetch_off_loop(evicted)
    assert evicted.exists()


async def test_however_much_is_fetched_a_save_is_stored(
    on_disk: CheckpointStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    begun = hold(monkeypatch, on_disk, "fetch", go_on)
    directories = [tmp_path / "local" / str(number) for number in range(2 * TRANSFER_THREADS)]
    async with holding(go_on, [asyncio.create_task(on_disk.fetch_off_loop(each)) for each in directories]):
        await until(lambda: len(begun) >= LOAD_THREADS)
        saved = write(tmp_path / "local" / "saved")
        await in_transfer_thread(on_disk.store, saved)
        assert on_disk.has(saved)


async def test_weights_are_waited_for_while_the_storage_is_away(
    s3: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "AWAY_S", 0.05)
    storage = CheckpointStorage(tmp_path / "local", f"s3://{BUCKET}/away", pauses_s=())
    (directory,) = only_stored(storage, "1")
    with s3.away():
        waiting = asyncio.ensure_future(when_possible(storage.fetch_off_loop, directory))
        await until(lambda: "tried again in" in caplog.text)
        assert not waiting.done()
        assert storage.listed("[0-9]*") == ()
    await waiting
    assert content(directory).keys() == {*FILES, FILE_NAME}


def test_a_copy_of_what_is_stored_is_made_within_the_storage(s3: ObjectStorage, tmp_path: Path) -> None:
    origin = CheckpointStorage(tmp_path / "checkpoints", f"s3://{BUCKET}/origin")
    target = CheckpointStorage(tmp_path / "snapshots", f"s3://{BUCKET}/target")
    source, copies = write(tmp_path / "checkpoints" / "1"), [tmp_path / "snapshots" / name for name in "ab"]
    for copy in copies:
        shutil.copytree(source, copy)
    target.store_copy(copies[0], source, origin)  # from here
    origin.store(source)
    for file in copies[1].iterdir():
        file.write_bytes(b"")
    target.store_copy(copies[1], source, origin)
    for copy in copies:
        shutil.rmtree(copy)
        target.fetch(copy)
        assert content(copy) == content(source)
