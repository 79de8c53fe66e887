"""Files of a model's weights in a directory, by Hugging Face's names."""

import json
import os
from pathlib import Path
from typing import Any

from skyrl_tinker.errors import StartupError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of reading a header that is damaged."""
_LENGTH_BYTES = 8


def weight_files(directory: Path) -> list[Path]:
    """List the files that the index names, else model.safetensors; none where there is neither.

    Others are no part: repositories hold the same weights once more in other formats. ValueError when the
    index is damaged or names files that are not there.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        single = directory / WEIGHTS_FILE
        return [single] if single.is_file() else []
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error
    files = sorted(directory / name for name in names)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{index} names {', '.join(missing)}, which are not there")
    return files


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the entries of a safetensors file, by tensor, and where its data begin.

    Raises an error of UNREADABLE for one that is damaged or cut.
    """
    with file.open("rb") as opened:
        total = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        data = _LENGTH_BYTES + length
        if data > total:
            raise ValueError(f"a header of {length} bytes in a file of {total}")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    end = data + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > total:
        raise ValueError(f"it has {total} of {end} bytes")
    return header, data


def listed_weights(base_model: Path) -> list[Path]:
    """List the files of its weights as `weight_files` does; its errors become a StartupError."""
    try:
        return weight_files(base_model)
    except (OSError, ValueError) as error:
        raise StartupError(str(error)) from error


def are_here(base_model: Path) -> bool:
    """Return whether there are weights, and all that an index names: not while they are fetched."""
    try:
        return bool(weight_files(base_model))
    except ValueError:
        return False


def require_whole(base_model: Path) -> None:
    """Refuse weights that are damaged or cut, which samplers tell without the file's name, or not there.

    Raises StartupError. Reads the headers only.
    """
    if not (files := listed_weights(base_model)):
        raise StartupError(f"'{base_model}' has neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    for file in files:
        try:
            read_header(file)
        except UNREADABLE as error:
            raise StartupError(f"'{file}' is not a whole safetensors file: {error}") from error
