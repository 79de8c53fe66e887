"""Safetensors files written tensor by tensor, so that no more than one whole tensor is in memory."""

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[torch.Tensor],
) -> None:
    """`tensors` come in the order of `shapes` and are cast to `dtype`. Durable when this returns."""
    with path.open("wb") as file:
        _write_header(file, shapes, dtype)
        for tensor in tensors:
            # a copy in any case: a storage that NumPy has seen cannot be resized any more
            flat = tensor.detach().to("cpu", dtype, copy=True).contiguous().view(-1)
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


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
