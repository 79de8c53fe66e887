"""Safetensors files: how tensors are distributed over them, their names, and writing one tensor by tensor."""

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

SUFFIX = ".safetensors"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def deal(sizes: Mapping[str, int], shares: int) -> list[list[str]]:
    """Split the names into shares of about equal size, in the order of the layers.

    Only layers at a border between shares are split: samplers hold the parts of a layer until the last has
    arrived. There are fewer shares than asked for if there are too few names.
    """
    dealt: list[list[str]] = [[] for _ in range(min(shares, len(sizes)))]
    total, before, share = sum(sizes.values()), 0, 0
    for place, (name, size) in enumerate(sizes.items()):
        after = len(dealt) - share - 1  # each needs a name
        full = before + size / 2 >= total * (share + 1) / len(dealt)
        if after and dealt[share] and (full or len(sizes) - place <= after):
            share += 1
        dealt[share].append(name)
        before += size
    return dealt


def shard_name(stem: str, index: int, count: int) -> str:
    """Return Hugging Face's name of a shard: model.safetensors, or model-00001-of-00002.safetensors."""
    return f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{index + 1:05}-of-{count:05}{SUFFIX}"


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[torch.Tensor]
) -> None:
    """Write `tensors` in host memory, of `dtype` and in the order of `shapes`. Durable."""
    with path.open("wb") as file:
        _write_header(file, shapes, dtype)
        for tensor in tensors:
            assert tensor.dtype == dtype, "the header says so"
            flat = tensor.contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)  # `tofile` would not say why it fails
        file.flush()
        os.fsync(file.fileno())


def _write_header(file: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
