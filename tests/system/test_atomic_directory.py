"""Directories that appear complete and durable, or leave nothing."""

import errno
import os
from pathlib import Path

import pytest

from skyrl_tinker.engine.recovery.leftovers import sweep_partial
from skyrl_tinker.errors import DiskFullError, StorageError
from skyrl_tinker.system.atomic_directory import (
    atomic_directory,
    make_durable,
    make_staging,
    publish,
    staging_of,
    storage_errors,
)


def test_it_appears_complete_when_the_block_ends(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "v1"
    with atomic_directory(directory) as staging:
        (staging / "a").write_bytes(b"abc")
        assert not directory.exists()
    assert [path.name for path in directory.parent.iterdir()] == ["v1"]
    assert (directory / "a").read_bytes() == b"abc"


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with atomic_directory(tmp_path / "v1") as staging:
            (staging / "a").write_bytes(b"abc")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_all_is_synced_before_the_rename_and_the_parent_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    directory = tmp_path / "v1"
    sync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(f"{path.relative_to(tmp_path)}{' renamed' * directory.exists()}")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    staging = make_staging(directory)
    (staging / "inner").mkdir()
    (staging / "inner" / "a").write_bytes(b"abc")
    assert publish(staging, directory) == len(b"abc")
    assert sorted(synced) == [". renamed", ".v1.partial", ".v1.partial/inner", ".v1.partial/inner/a"]
    assert synced[-1] == ". renamed"


def test_what_a_crash_leaves_is_swept_and_does_not_stop_another_attempt(tmp_path: Path) -> None:
    (make_staging(tmp_path / "v1") / "old").touch()
    with atomic_directory(tmp_path / "v1") as staging:
        assert list(staging.iterdir()) == []
    make_staging(tmp_path / "v2")
    sweep_partial([tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_an_existing_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "a").touch()
    make_staging(tmp_path / "v1")
    with pytest.raises(OSError, match="not empty"):
        publish(staging_of(tmp_path / "v1"), tmp_path / "v1")


def test_storage_errors_carry_the_systems_reason(tmp_path: Path) -> None:
    expected = "the export could not be written: No such file or directory"
    with pytest.raises(StorageError, match=expected), storage_errors("the export could not be written"):
        (tmp_path / "absent").stat()


def test_a_full_disk_is_told_from_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, sync = make_staging(tmp_path / "v1"), os.fsync
    (staging / "a").write_bytes(b"abc")

    def fail(descriptor: int) -> None:
        if not staging.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFullError, match="not written: No space left"), storage_errors("not written"):
        publish(staging, tmp_path / "v1")
    monkeypatch.undo()
    assert make_durable(tmp_path / "v1") == len(b"abc"), "it was complete"
