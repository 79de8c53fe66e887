"""Weights from one process to another on the same GPU: our sender, and a reader like vLLM's."""

import hashlib
import multiprocessing
import pickle
import signal
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpu_check.checks import Check
from gpu_check.rows import Row, require, same, skipped
from gpu_check.setting import NOT_ON_CPU, Setting
from skyrl_tinker.processes import die_with_parent
from skyrl_tinker.weight_sync.cuda_ipc import CudaIpcSender, merge_handles, update_message

LIMIT = 1 << 20
TIMEOUT_S = 60.0
Sums = Mapping[str, tuple[str, str]]
"""Type and checksum of each tensor."""


def checks(setting: Setting) -> list[Check]:
    return [Check("CUDA IPC", _skip if setting.small else _send)]


def _skip() -> Iterator[Row]:
    yield skipped("CUDA IPC between two processes", NOT_ON_CPU)


def _send() -> Iterator[Row]:
    context = multiprocessing.get_context("fork")  # now: CUDA, which starts below, does not survive a fork
    here, there = context.Pipe()
    reader = context.Process(target=_read, args=(there,), daemon=True)
    reader.start()
    there.close()
    with tempfile.TemporaryDirectory() as directory:
        expected = _write(Path(directory))
        sender = CudaIpcSender(0)
        chunks, handle = sender.open(directory, LIMIT)
        handles = merge_handles([handle])
        arrived: dict[str, tuple[str, str]] = {}
        for index, chunk in enumerate(chunks):
            sender.load(index)
            here.send(dict(update_message(chunk, handles)))
            if not here.poll(TIMEOUT_S):
                raise TimeoutError(f"the reader did not answer within {TIMEOUT_S:.0f} s")
            arrived |= here.recv()
        here.send(None)
        reader.join(TIMEOUT_S)
    yield same(f"CUDA IPC: {len(expected)} tensors in {len(chunks)} chunks", arrived == expected)
    yield require("CUDA IPC: exit code of the reader", reader.exitcode == 0, str(reader.exitcode), "0")
    held = torch.cuda.memory_allocated()
    sender.close()
    freed = held - torch.cuda.memory_allocated()
    yield require("CUDA IPC: bytes freed by closing", freed > 0, float(freed), "> 0")


def _write(directory: Path) -> Sums:
    """Write several chunks of mixed types, one tensor larger than a chunk, and one empty."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    tensors = {f"t{i}": torch.randn(101 + i, 777, generator=generator).to(dtypes[i % 3]) for i in range(12)}
    tensors |= {"large": torch.randn(1 << 19, generator=generator), "none": torch.empty(0, 3)}
    save_file(tensors, directory / "model.safetensors")
    loaded = load_file(directory / "model.safetensors")
    return {name: (str(tensor.dtype)[6:], _checksum(tensor)) for name, tensor in loaded.items()}


def _read(updates: Connection) -> None:
    """Map the buffer once, then read every chunk's tensors out of it while the sender waits."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    die_with_parent(signal.SIGKILL)
    buffer = None
    while (update := updates.recv()) is not None:
        if buffer is None:
            gpu = str(torch.cuda.get_device_properties(0).uuid)
            arguments = list(pickle.loads(b64decode(update["ipc_handles_pickled"]))[gpu])
            arguments[6] = 0  # the device as this process counts
            buffer = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        updates.send(_sums(buffer, update))
    del buffer


def _sums(buffer: torch.Tensor, update: Mapping[str, Any]) -> Sums:
    sizes = update["tensor_sizes"]
    parts = torch.split(buffer[: sum(sizes)], sizes)
    described = zip(update["names"], update["dtype_names"], update["shapes"], parts, strict=True)
    return {
        name: (dtype, _checksum(part.view(getattr(torch, dtype)).view(shape)))
        for name, dtype, shape, part in described
    }


def _checksum(tensor: torch.Tensor) -> str:
    """Checksum of the shape and the bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(str(tuple(tensor.shape)).encode() + flat.numpy().tobytes()).hexdigest()
