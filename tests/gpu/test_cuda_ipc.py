"""CUDA IPC between two processes on one GPU, with torch alone: our sender, and a reader like vLLM's."""

import asyncio
import multiprocessing
import pickle
from base64 import b64decode
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_tinker.weight_sync.cuda_ipc import CudaIpcSender, merge_handles, update_message

LIMIT = 1 << 20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Several chunks of mixed types, one tensor larger than a chunk, one empty."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    tensors = {f"t{i}": torch.randn(101 + i, 777, generator=generator).to(dtypes[i % 3]) for i in range(12)}
    tensors |= {"large": torch.randn(1 << 19, generator=generator), "none": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def read_in_another_process(updates: Connection) -> None:
    """Maps the buffer once, then copies every chunk's tensors out of it while the sender waits."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    gpu = str(torch.cuda.get_device_properties(0).uuid)
    buffer = None
    while (update := updates.recv()) is not None:
        if buffer is None:
            arguments = list(pickle.loads(b64decode(update["ipc_handles_pickled"]))[gpu])
            arguments[6] = 0  # the device as this process counts
            buffer = rebuild_cuda_tensor(*arguments)
        updates.send(_tensors(buffer, update))
    del buffer


def _tensors(buffer: torch.Tensor, update: dict[str, Any]) -> dict[str, Any]:
    sizes = update["tensor_sizes"]
    parts = buffer[: sum(sizes)].split(sizes)
    described = zip(update["names"], update["dtype_names"], update["shapes"], parts, strict=True)
    return {
        name: (dtype, part.view(getattr(torch, dtype)).view(shape).cpu().view(-1).view(torch.uint8).numpy())
        for name, dtype, shape, part in described
    }


async def test_another_process_reads_every_chunk_to_the_last_bit(weights: Path) -> None:
    sender = CudaIpcSender(0)
    chunks, handle = sender.open(str(weights), LIMIT)
    assert len(chunks) > 3
    handles = merge_handles([handle])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    reader = context.Process(target=read_in_another_process, args=(there,))
    reader.start()
    arrived: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        sender.load(index)
        here.send(dict(update_message(chunk, handles)))
        arrived |= await asyncio.to_thread(here.recv)
    here.send(None)
    await asyncio.to_thread(reader.join)
    assert reader.exitcode == 0
    expected = load_file(weights / "model.safetensors")
    assert arrived.keys() == expected.keys()
    for name, (dtype, content) in arrived.items():
        assert getattr(torch, dtype) == expected[name].dtype
        assert content.tobytes() == expected[name].view(-1).view(torch.uint8).numpy().tobytes(), name
    held = torch.cuda.memory_allocated()
    sender.close()
    assert torch.cuda.memory_allocated() < held
