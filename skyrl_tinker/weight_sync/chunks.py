"""Tensors of a version, cut into chunks; for those in files, their index and their bytes.

Imports no torch: the engine reads the index too, and bytes have no type.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from skyrl_tinker.domain.weight_files import UNREADABLE, WEIGHTS_FILE, read_header, weight_files
from skyrl_tinker.errors import SamplerError

DTYPES = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Name in the safetensors format -> name in torch, bytes of an element."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str  # torch's name
    shape: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorEntry):
    """One tensor in a file; `start` is the first byte of its data there."""

    file: str
    start: int


E = TypeVar("E", bound=TensorEntry)


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """Tensors that are sent together as one buffer of bytes, end to end without gaps."""

    entries: tuple[TensorEntry, ...]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @property
    def sizes(self) -> list[int]:
        return [entry.size for entry in self.entries]

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    @property
    def dtypes(self) -> list[str]:
        return [entry.dtype for entry in self.entries]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(entry.shape) for entry in self.entries]


@dataclass(frozen=True, slots=True)
class StoredChunk(WeightChunk):
    entries: tuple[StoredTensor, ...]

    def read(self, buffer: memoryview) -> None:
        """Fill [size] bytes. Raises SamplerError when a file has become shorter or cannot be read."""
        with ExitStack() as files:
            opened: dict[str, int] = {}
            offset = 0
            for entry in self.entries:
                if entry.file not in opened:
                    opened[entry.file] = _open(entry.file)
                    files.callback(os.close, opened[entry.file])
                _read_into(opened[entry.file], buffer[offset : offset + entry.size], entry)
                offset += entry.size


def read_chunks(directory: Path, limit: int) -> tuple[StoredChunk, ...]:
    """List the tensors of the weights in `directory`, cut at `limit` bytes; no data is read.

    Dtypes with larger elements come first, so that every tensor is aligned in its chunk. Raises SamplerError
    when there are no tensors or a file is damaged.
    """
    entries = [entry for file in _weight_files(directory.absolute()) for entry in _read_index(file)]
    if not entries:
        raise SamplerError(f"'{directory}' holds no {WEIGHTS_FILE}, so there are no weights to serve")
    aligned = sorted(entries, key=lambda entry: -entry.itemsize)
    return tuple(StoredChunk(group) for group in cut(aligned, limit))


def cut(entries: Iterable[E], limit: int) -> Iterator[tuple[E, ...]]:
    """Cut into groups of at most `limit` bytes, in the order of `entries`; a larger tensor is alone."""
    group: list[E] = []
    size = 0
    for entry in entries:
        if group and size + entry.size > limit:
            yield tuple(group)
            group, size = [], 0
        group.append(entry)
        size += entry.size
    if group:
        yield tuple(group)


def _weight_files(directory: Path) -> list[Path]:
    try:
        return weight_files(directory)
    except ValueError as error:
        raise SamplerError(str(error)) from error


def _read_index(path: Path) -> list[StoredTensor]:
    try:
        header, data = read_header(path)
        return [_entry(name, value, path, data) for name, value in header.items()]
    except UNREADABLE as error:
        raise SamplerError(f"'{path}' is not a whole safetensors file: {error}") from error


def _entry(name: str, value: dict[str, Any], path: Path, data: int) -> StoredTensor:
    dtype, itemsize = DTYPES[value["dtype"]]
    begin, end = value["data_offsets"]
    entry = StoredTensor(name, dtype, tuple(value["shape"]), itemsize, str(path), data + begin)
    if entry.size != end - begin:
        raise ValueError(f"tensor {name} lies outside of its bytes")
    return entry


def _open(file: str) -> int:
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise SamplerError(f"the weights cannot be read: {error}") from error


def _read_into(descriptor: int, buffer: memoryview, entry: StoredTensor) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], entry.start + done)
        if not count:
            raise SamplerError(f"{entry.file} ends within tensor {entry.name}")
        done += count
