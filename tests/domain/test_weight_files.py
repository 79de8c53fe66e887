from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tinker.domain.weight_files import INDEX_FILE, UNREADABLE, read_header, require_whole, weight_files
from skyrl_tinker.errors import StartupError
from tests.support.shards import write_index


def touch(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).touch()


def test_the_same_weights_in_another_format_are_no_part_of_the_model(tmp_path: Path) -> None:
    """As in Mistral's repositories: one file or several, and all of them once more."""
    touch(tmp_path, "consolidated.safetensors")
    assert weight_files(tmp_path) == []
    touch(tmp_path, "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    shards = write_index(tmp_path, ["a", "b"])
    touch(tmp_path, *(shard.name for shard in shards))
    assert weight_files(tmp_path) == shards


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": ["a"]}', "\xff"])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"index\.json is not an index of weights"):
        weight_files(tmp_path)


def test_a_directory_without_weights_is_none_to_be_served(tmp_path: Path) -> None:
    """As one of the hub's whose weights are still on their way."""
    with pytest.raises(StartupError, match=r"has neither model\.safetensors nor model\.safetensors\.index"):
        require_whole(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    first, second = write_index(tmp_path, ["a", "b"])
    touch(tmp_path, first.name)
    with pytest.raises(ValueError, match=f"names {second.name}, which are not there"):
        weight_files(tmp_path)


def test_a_file_that_is_cut_anywhere_is_found_by_its_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(9), "b": np.ones(3)}, file, metadata={"format": "np"})
    whole = file.read_bytes()
    header, data = read_header(file)
    assert sorted(header) == ["a", "b"]
    assert data + header["b"]["data_offsets"][1] == len(whole)
    for content in (whole[:-1], whole[: data - 1], whole[:3], b"", whole[:8] + b"[]" + whole[10:]):
        file.write_bytes(content)
        with pytest.raises(UNREADABLE):
            read_header(file)
