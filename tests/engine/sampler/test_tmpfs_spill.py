"""Ephemeral weights move to disk when memory runs low, and are found where they were."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.errors import StorageError
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from tests.support.failures import files_up_to

FILE = "adapter_model.safetensors"


@pytest.fixture
def memory() -> Iterator[Path]:
    """Another file system than `tmp_path`."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def published(memory: Path, number: int) -> WeightVersion:
    directory = memory / f"v{number}"
    directory.mkdir()
    (directory / FILE).write_bytes(bytes([number]) * 1000)
    (directory / "adapter_config.json").write_text("{}")
    return WeightVersion(VersionId(number), "lora", str(directory))


def in_memory(version: WeightVersion) -> bool:
    return not any(file.is_symlink() for file in Path(version.directory).iterdir())


def content(version: WeightVersion) -> bytes:
    return (Path(version.directory) / FILE).read_bytes()


def test_what_moved_is_read_where_it_was(memory: Path, tmp_path: Path) -> None:
    overflow = TmpfsSpill(memory, tmp_path / "disk", spare=1.0)
    assert overflow.low()
    version, other = published(memory, 1), published(memory, 2)
    with (Path(version.directory) / FILE).open("rb") as opened:
        overflow.move(version)
        assert opened.read() == bytes([1]) * 1000
    assert (in_memory(version), in_memory(other)) == (False, True)
    assert content(version) == bytes([1]) * 1000
    overflow.move(version)  # once more is harmless
    assert content(version) == bytes([1]) * 1000


def test_a_version_whose_files_are_gone_is_no_obstacle(memory: Path, tmp_path: Path) -> None:
    """As after a reboot: those that come after it must still move."""
    overflow = TmpfsSpill(memory, tmp_path / "disk", spare=1.0)
    gone, version = published(memory, 1), published(memory, 2)
    shutil.rmtree(gone.directory)
    for each in (gone, version):
        overflow.move(each)
    assert not in_memory(version)
    assert not (tmp_path / "disk" / gone.name).exists()


def test_memory_is_not_low_while_the_spare_part_is_free(memory: Path, tmp_path: Path) -> None:
    assert not TmpfsSpill(memory, tmp_path / "disk", spare=0.0).low()


def test_a_disk_is_never_low(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    assert not TmpfsSpill(tmp_path / "memory", tmp_path / "disk", spare=1.0).low()


def test_a_full_disk_leaves_the_version_where_it_is(memory: Path, tmp_path: Path) -> None:
    overflow = TmpfsSpill(memory, tmp_path / "disk", spare=1.0)
    version = published(memory, 1)
    with files_up_to(500), pytest.raises(OSError, match="File too large"):
        overflow.move(version)
    assert content(version) == bytes([1]) * 1000
    assert not (tmp_path / "disk" / "v1" / FILE).exists()


def test_a_removed_version_leaves_nothing_on_either(memory: Path, tmp_path: Path) -> None:
    overflow = TmpfsSpill(memory, tmp_path / "disk", spare=1.0)
    versions = [published(memory, number) for number in (1, 2)]
    overflow.move(versions[0])
    for version in versions:
        overflow.remove(version)
    assert list(memory.iterdir()) == list((tmp_path / "disk").iterdir()) == []


def test_a_sweep_removes_what_no_engine_knows(memory: Path, tmp_path: Path) -> None:
    overflow = TmpfsSpill(memory, tmp_path / "disk", spare=1.0)
    for number in (1, 2, 3):
        overflow.move(published(memory, number))
    (memory / "home").write_text("/home")
    overflow.sweep({"v1"})
    assert {path.name for path in memory.iterdir()} == {"v1", "home"}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["v1"]


def test_what_was_kept_is_there_again_after_a_reboot(memory: Path, tmp_path: Path) -> None:
    spill = TmpfsSpill(memory, tmp_path / "disk", spare=1.0)
    kept, moved, lost = published(memory, 1), published(memory, 2), published(memory, 3)
    spill.keep(kept)
    assert in_memory(kept), "samplers go on reading it from there"
    spill.move(moved)
    for version in (kept, moved, lost):
        shutil.rmtree(version.directory)
    for version in (kept, moved, lost):
        asyncio.run(spill.restore(version))
    assert (content(kept), content(moved)) == (bytes([1]) * 1000, bytes([2]) * 1000)
    assert not Path(lost.directory).exists()
    spill.remove(kept)
    asyncio.run(spill.restore(kept))
    assert not Path(kept.directory).exists()


def test_a_copy_that_was_cut_short_is_not_taken_for_a_kept_one(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = TmpfsSpill(memory, tmp_path / "disk", spare=1.0)
    version = published(memory, 1)

    def cut_short(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError("power cut")

    monkeypatch.setattr(shutil, "copyfile", cut_short)
    with pytest.raises(OSError, match="power cut"):
        spill.keep(version)
    shutil.rmtree(version.directory)
    asyncio.run(spill.restore(version))
    assert not Path(version.directory).exists()


def test_what_could_not_be_stored_at_first_is_whole_for_another_host(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/storage"
    storage = CheckpointStorage(tmp_path / "disk", url, pauses_s=())
    version = published(memory, 1)
    with monkeypatch.context() as away:
        away.setattr(storage._files, "put_file", lambda *_: (tmp_path / "nobody").rmdir())
        with pytest.raises(StorageError, match="cannot write"):
            TmpfsSpill(memory, tmp_path / "disk", storage).keep(version)
    TmpfsSpill(memory, tmp_path / "disk", storage).keep(version)
    before = content(version)
    shutil.rmtree(version.directory)
    other = CheckpointStorage(tmp_path / "other", url, pauses_s=())
    asyncio.run(TmpfsSpill(memory, tmp_path / "other", other).restore(version))
    assert content(version) == before


def test_what_another_host_stored_goes_too(memory: Path, tmp_path: Path) -> None:
    url, version = f"file://{tmp_path}/storage", published(memory, 1)
    there, here = (CheckpointStorage(tmp_path / host, url, pauses_s=()) for host in ("there", "here"))
    TmpfsSpill(memory, tmp_path / "there", there).keep(version)
    TmpfsSpill(memory, tmp_path / "here", here).remove(version)
    assert not here.has(tmp_path / "here" / version.name)
