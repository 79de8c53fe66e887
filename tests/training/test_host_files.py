"""Files of checkpoints on a host that shares the engine's directories, or does not."""

from pathlib import Path

import pytest

from skyrl_tinker.training.host_files import HostFiles

MARK = ".shared"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostFiles:
    """It shares one directory and not the other, neither of which has the scratch directory."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / MARK).touch()
    files = HostFiles(str(tmp_path / "memory"))
    apart = str(tmp_path / "apart")
    assert files.look_for({str(tmp_path / "shared"): MARK, apart: MARK}) == [apart]
    return files


def test_only_what_is_not_shared_lies_elsewhere(files: HostFiles, tmp_path: Path) -> None:
    for place in ("shared/1", "memory/1", "apart~/1"):
        assert files.here(str(tmp_path / place)) == tmp_path / place
    assert files.here(str(tmp_path / "apart" / "1")).is_relative_to(tmp_path / "tmp")


def test_a_file_is_written_and_read_in_parts(files: HostFiles, tmp_path: Path) -> None:
    directory = str(tmp_path / "apart" / "1")
    for offset, part in ((0, b"abc"), (3, b"de")):
        files.write(f"{directory}/a", offset, part)
    files.write(f"{directory}/empty", 0, b"")
    assert files.sizes(directory) == {"a": 5, "empty": 0}
    assert [files.read(f"{directory}/a", offset, 2) for offset in (0, 2, 4)] == [b"ab", b"cd", b"e"]
    files.write(f"{directory}/a", 0, b"x")
    assert files.sizes(directory)["a"] == 1, "of an earlier try nothing is left"
    assert not (tmp_path / "apart").exists()
    files.remove(directory)
    files.remove(directory)
    assert not files.here(directory).exists()


def test_what_dead_ranks_left_goes_and_nobody_elses_directory(files: HostFiles, tmp_path: Path) -> None:
    files.write(str(tmp_path / "apart" / "1" / "a"), 0, b"a")
    (tmp_path / "memory").mkdir()
    (tmp_path / "apart").mkdir()
    files.drop_leftovers()
    assert not files.here(str(tmp_path / "apart" / "1")).exists()
    assert (tmp_path / "apart").exists()
    assert not (tmp_path / "memory").exists()
