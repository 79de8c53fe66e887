"""Transport to samplers on the trainer's own GPUs: they read a chunk in place, through their `ipc` engine.

On a GPU, scripts/gpu-check has sent weights between two processes, neither of them a sampler. Tested on CPU:
messages, chunks and their bytes, against the samplers' own message types and unpacking.
"""

import base64
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.values import Way
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import ChunkSender, Message, SenderTransport, WeightSource

if TYPE_CHECKING:
    from skyrl_tinker.weight_sync.chunk_buffer import ChunkSource

NAME = "cuda_ipc"
Opened = tuple[Sequence[WeightChunk], bytes]
"""Chunks of a version, and this GPU's id with a handle of the buffer there, pickled."""


class CudaIpcSender(ChunkSender):
    """Sender in every rank of the trainer: each puts the same bytes on its own GPU."""

    device = "cuda"
    everywhere = True

    def _open(self, source: "ChunkSource") -> Opened:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = self._buffered(source)
        _, handle = reduce_tensor(buffer.exported)  # type: ignore[no-untyped-call]
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return buffer.chunks, pickle.dumps((gpu, handle))

    def merge(self, handles: Sequence[bytes]) -> str:
        """Merge all ranks' handles by GPU, as samplers take them; in a rank, as the engine has no torch."""
        return merge_handles(handles)

    def close(self) -> None:
        import torch

        super().close()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class CudaIpcTransport(SenderTransport):
    backend = "ipc"
    staged = False
    ways: tuple[Way, Way] = ("cuda ipc", "cuda ipc")
    sender = CudaIpcSender
    _handles = ""

    async def open(self, source: WeightSource) -> Sequence[WeightChunk]:
        opened = await self._open(source)
        self._chunks = opened[0][0]
        self._handles = await self._senders.root_call("merge", [handle for _, handle in opened])
        return self._chunks

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        return [{"packed": True} for _ in workers]

    async def load(self, index: int) -> Message:
        """Overwrite the previous chunk, which the workers have read by then."""
        self._require_same_ranks()
        await self._senders.sender_call("load", index)
        return update_message(self._chunks[index], self._handles)


def merge_handles(handles: Sequence[bytes]) -> str:
    """Merge our ranks' pickles of (GPU id, handle) into base64 of the pickle of {GPU id: handle}."""
    by_gpu: dict[str, Any] = dict(pickle.loads(handle) for handle in handles)
    return base64.b64encode(pickle.dumps(by_gpu)).decode()


def update_message(chunk: WeightChunk, handles: str) -> Message:
    return {
        "names": chunk.names,
        "dtype_names": chunk.dtypes,
        "shapes": chunk.shapes,
        "tensor_sizes": chunk.sizes,
        "ipc_handles_pickled": handles,
    }
