"""Leftovers of a dead engine go."""

import os
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.recovery.leftovers import (
    list_abandoned,
    list_saves,
    remove,
    sweep_partial,
    sweep_unrecorded,
)
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.store import Store
from tests.engine.support import journal


def list_directories(root: Path) -> list[Path]:
    return list(root.glob("*/*/*"))


def test_what_was_half_written_goes_whoever_wrote_it(tmp_path: Path) -> None:
    for name in (".v3.partial", "..v4.partial.tmp", ".0007.1a2b.tmp", "0007", "v2"):
        (tmp_path / name).mkdir()
    sweep_partial([tmp_path, tmp_path / "absent"])
    assert {path.name for path in tmp_path.iterdir()} == {"0007", "v2"}


async def test_tries_of_saves_that_were_not_recorded_go_and_what_is_unknown_stays(
    store: Store, tmp_path: Path
) -> None:
    model = await journal.ready_model(store)
    key, number = await journal.submit_save(store, model)
    step = (await journal.outcome(store, await journal.submit_step(store, model, 2))).future_id
    of_model = tmp_path / str(key) / "weights"
    recorded, removed = of_model / f"a~{number}.0a1b2c3d", of_model / "b~7"
    died, newer = of_model / f"a~{number}.ffffffff", of_model / f"a~{number + 1000}.ffffffff"
    others = [of_model / f"a~{step}.ffffffff", of_model / "mine", tmp_path / "99" / "weights" / f"a~{number}"]
    for directory in (recorded, removed, died, newer, *others):
        directory.mkdir(parents=True)

    def record(conn: Connection) -> None:
        for name, directory in (("a", recorded), ("b", removed)):
            new = NewCheckpoint(key, CheckpointKind.WEIGHTS, name, str(directory), "tiny", LoraSpec(8, 1), 1)
            number = checkpoint_records.add(conn, new, replace=False)
        checkpoint_records.mark_removed(conn, number)

    await store.write(record)
    remove(await store.write(partial(list_abandoned, saves=list_saves(tmp_path))))
    assert set(list_directories(tmp_path)) == {recorded, newer, *others}


async def test_saves_stay_whose_root_has_another_name_now(store: Store, tmp_path: Path) -> None:
    key, number = await journal.submit_save(store, await journal.ready_model(store))
    disk, link = tmp_path / "disk", tmp_path / "link"
    directory = disk / str(key) / "weights" / f"a~{number}.0a1b2c3d"
    imported = disk / "import-1" / "weights" / "b"
    for each in (directory, imported):
        each.mkdir(parents=True)
        new = NewCheckpoint(key, CheckpointKind.WEIGHTS, each.name, str(each), "tiny", LoraSpec(8, 1), 1)
        await store.write(partial(checkpoint_records.add, new=new, replace=False))
    os.utime(disk / "import-1", (0, 0))
    link.symlink_to(disk)
    remove(await store.write(partial(list_abandoned, saves=list_saves(link))))
    sweep_unrecorded(link, [str(directory), str(imported)])
    assert directory.is_dir()
    assert imported.is_dir()


def test_what_others_write_is_not_half_written_before_a_day_is_over(tmp_path: Path) -> None:
    """They go on while an engine starts."""
    names = [".copy-1.partial", ".import-1.partial"]
    for name in names:
        (tmp_path / name).mkdir()
    sweep_partial([tmp_path])
    sweep_unrecorded(tmp_path, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in names:
        os.utime(tmp_path / name, (0, 0))
    sweep_unrecorded(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_copies_and_imports_that_nobody_recorded_go_after_a_day(tmp_path: Path) -> None:
    recorded = tmp_path / "copy-1" / "weights" / "a"
    old = [tmp_path / name for name in ("copy-1", "copy-2", "import-3", "7")]
    for directory in (recorded, *old, tmp_path / "copy-4"):
        directory.mkdir(parents=True, exist_ok=True)
    for directory in old:
        os.utime(directory, (0, 0))
    sweep_unrecorded(tmp_path, [str(recorded)])
    assert {path.name for path in tmp_path.iterdir()} == {"copy-1", "7", "copy-4"}


def test_a_copy_that_is_published_during_the_sweep_does_not_end_it(tmp_path: Path) -> None:
    """Listed under a name that it has no more, as a link to nothing."""
    for name in ("copy-1", "import-1"):
        (tmp_path / f".{name}.partial").symlink_to(tmp_path / "published")
        (tmp_path / f"old-{name}").mkdir()
    old = [tmp_path / name for name in ("copy-0", "import-2")]
    for directory in old:
        directory.mkdir()
        os.utime(directory, (0, 0))
    sweep_unrecorded(tmp_path, [])
    assert not any(directory.exists() for directory in old)


def test_of_saves_no_directories_are_looked_into_that_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be gone when it comes to them."""
    (tmp_path / ".copy-1.partial" / "weights" / "a~1.ffffffff").mkdir(parents=True)
    (tmp_path / "7" / "weights" / "a~1.ffffffff").mkdir(parents=True)
    scandir = os.scandir

    def gone(path: Path) -> object:
        if ".copy" in str(path):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert set(list_saves(tmp_path)) == {tmp_path / "7" / "weights" / "a~1.ffffffff"}
