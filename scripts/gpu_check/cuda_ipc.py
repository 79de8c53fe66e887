"""Weights from one process to another on the same GPU: our sender, and a reader like vLLM's.

They come from files and from captured copies, in pinned memory on a GPU.
"""

import hashlib
import itertools
import multiprocessing
import pickle
import signal
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_check.checks import Check
from gpu_check.rows import Row, require, same, skipped
from gpu_check.setting import NOT_ON_CPU, Setting
from skyrl_tinker.system.processes import die_with_parent
from skyrl_tinker.training.models.trainable_model import HostCopy
from skyrl_tinker.training.weight_share import WeightShare
from skyrl_tinker.weight_sync.captured_chunks import CapturedSource
from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer
from skyrl_tinker.weight_sync.cuda_ipc import CudaIpcSender, Opened, merge_handles, update_message

LIMIT = 1 << 20
TIMEOUT_S = 60.0
Sums = Mapping[str, tuple[str, str]]
"""Type and checksum of each tensor."""


def checks(setting: Setting) -> list[Check]:
    return [
        Check(
            "CUDA IPC", _skip if setting.small else _send
        ),  # first: its reader is forked before CUDA starts
        Check("captured weights", partial(_read_captured, setting)),
    ]


def _read_captured(setting: Setting) -> Iterator[Row]:
    """Read captured tensors into a send buffer, chunk by chunk, as `_send` does in the sender."""
    tensors = _tensors((torch.bfloat16,))
    share = _captured(tensors, torch.device(setting.device))
    buffer = ChunkBuffer(CapturedSource(share, LIMIT, everywhere=True), setting.device)
    arrived: dict[str, tuple[str, str]] = {}
    for index, chunk in enumerate(buffer.chunks):
        arrived |= sums(buffer.load(index), update_message(chunk, ""))
    buffer.close()
    yield same(f"captured weights: {len(tensors)} tensors, chunk by chunk", arrived == described(tensors))
    pinned = all(tensor.is_pinned() for tensor in share.tensors.values() if tensor.numel())
    if not setting.small:
        yield require("captured weights: in pinned memory", pinned, str(pinned), "True")


def _skip() -> Iterator[Row]:
    yield skipped("CUDA IPC between two processes", NOT_ON_CPU)


def _send() -> Iterator[Row]:
    context = multiprocessing.get_context("fork")  # now: CUDA, which starts below, does not survive a fork
    here, there = context.Pipe()
    reader = context.Process(target=_read, args=(there,), daemon=True)
    reader.start()
    there.close()
    with tempfile.TemporaryDirectory() as directory:
        stored, captured = (
            _tensors((torch.bfloat16, torch.float32, torch.float16)),
            _tensors((torch.bfloat16,)),
        )
        save_file(stored, Path(directory) / "model.safetensors")
        sender = CudaIpcSender(0)
        share = _captured(captured, torch.device("cuda"))
        opened = {
            "files": (stored, lambda: sender.open(directory, LIMIT)),
            "captured copies": (captured, lambda: sender.open_captured(share, LIMIT)),
        }
        for name, (tensors, open_source) in opened.items():
            yield from _exchange(name, here, sender, open_source(), described(tensors))
    here.send(None)
    reader.join(TIMEOUT_S)
    yield require("CUDA IPC: exit code of the reader", reader.exitcode == 0, str(reader.exitcode), "0")


def _exchange(
    name: str, here: Connection, sender: CudaIpcSender, opened: Opened, expected: Sums
) -> Iterator[Row]:
    chunks, handle = opened
    handles = merge_handles([handle])
    arrived: dict[str, tuple[str, str]] = {}
    for index, chunk in enumerate(chunks):
        sender.load(index)
        here.send(dict(update_message(chunk, handles)))
        if not here.poll(TIMEOUT_S):
            raise TimeoutError(f"the reader did not answer within {TIMEOUT_S:.0f} s")
        arrived |= here.recv()
    yield same(f"CUDA IPC from {name}: {len(expected)} tensors in {len(chunks)} chunks", arrived == expected)
    here.send({})
    here.recv()
    held = torch.cuda.memory_allocated()
    sender.close()
    freed = held - torch.cuda.memory_allocated()
    yield require(f"CUDA IPC from {name}: bytes freed by closing", freed > 0, float(freed), "> 0")


def _tensors(dtypes: Sequence[torch.dtype]) -> dict[str, torch.Tensor]:
    """Return several chunks of these types in turn, one tensor larger than a chunk, and one empty."""
    generator = torch.Generator().manual_seed(0)
    given = itertools.cycle(dtypes)
    shapes = {f"t{i}": (101 + i, 777) for i in range(12)} | {"large": (1 << 20,), "none": (0, 3)}
    return {name: torch.randn(shape, generator=generator).to(next(given)) for name, shape in shapes.items()}


def _captured(tensors: Mapping[str, torch.Tensor], device: torch.device) -> WeightShare:
    """Copy the tensors to the device and capture them there, as a rank does."""
    copy = HostCopy(torch.bfloat16, pinned=True)
    copies = {name: copy(tensor.to(device)) for name, tensor in tensors.items()}
    if device.type == "cuda":
        torch.cuda.synchronize()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return WeightShare(0, torch.bfloat16, [shapes], copies, None)


def described(tensors: Mapping[str, torch.Tensor]) -> Sums:
    return {name: (str(tensor.dtype)[6:], _checksum(tensor)) for name, tensor in tensors.items()}


def _read(updates: Connection) -> None:
    """Map each buffer once and read every chunk's tensors out of it while the sender waits; {} unmaps it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    die_with_parent(signal.SIGKILL)
    buffer, handles = None, ""
    while (update := updates.recv()) is not None:
        if not update:
            buffer, handles = None, ""
            torch.cuda.synchronize()
            updates.send({})
            continue
        if update["ipc_handles_pickled"] != handles:
            handles = update["ipc_handles_pickled"]
            gpu = str(torch.cuda.get_device_properties(0).uuid)
            arguments = list(pickle.loads(b64decode(handles))[gpu])
            arguments[6] = 0  # the device as this process counts
            buffer = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        assert buffer is not None
        updates.send(sums(buffer, update))


def sums(buffer: torch.Tensor, update: Mapping[str, Any]) -> Sums:
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
