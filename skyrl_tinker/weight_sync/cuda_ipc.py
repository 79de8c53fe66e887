"""Transport to samplers on the trainer's own GPUs: they read a chunk in place, through vLLM's `ipc` engine.

On a GPU, scripts/gpu-check has sent weights between two processes, neither of them vLLM. Tested on CPU:
messages, chunks and their bytes, against vLLM's own message types and unpacking.
"""

import base64
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.values import Way
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import Message, Senders, WeightSource, require_same_ranks

if TYPE_CHECKING:
    from skyrl_tinker.weight_sync.captured_chunks import CapturedShare
    from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer, ChunkSource

NAME = "cuda_ipc"
Opened = tuple[Sequence[WeightChunk], bytes]
"""Chunks of a version, and this GPU's id with a handle of the buffer there, pickled."""


class CudaIpcSender:
    """Sender in every rank of the trainer: each puts the same bytes on its own GPU."""

    def __init__(self, rank: int) -> None:
        self._buffer: ChunkBuffer | None = None

    def open(self, directory: str, limit: int) -> Opened:
        """Open a version's files. Raises SamplerError when they are missing or damaged."""
        from skyrl_tinker.weight_sync.chunk_buffer import FileSource

        return self._open(FileSource(Path(directory), limit))

    def open_captured(self, share: "CapturedShare", limit: int) -> Opened:
        """Open this rank's captured weights, at the same time as the other ranks."""
        from skyrl_tinker.weight_sync.captured_chunks import CapturedSource

        return self._open(CapturedSource(share, limit, everywhere=True))

    def _open(self, source: "ChunkSource") -> Opened:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer

        self._buffer = ChunkBuffer(source, "cuda")
        _, handle = reduce_tensor(self._buffer.exported)  # type: ignore[no-untyped-call]
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return self._buffer.chunks, pickle.dumps((gpu, handle))

    def merge(self, handles: Sequence[bytes]) -> str:
        """Merge all ranks' handles by GPU, as vLLM takes them; in a rank, as the engine has no torch."""
        return merge_handles(handles)

    def load(self, index: int) -> None:
        assert self._buffer is not None, "open() comes first"
        self._buffer.load(index)

    def close(self) -> None:
        import torch

        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class CudaIpcTransport:
    backend = "ipc"
    staged = False
    takes_captured = True
    ways: tuple[Way, Way] = ("cuda ipc", "cuda ipc")

    def __init__(self, senders: Senders, chunk_bytes: int) -> None:
        self.members: tuple[str, ...] = ()
        self._senders = senders
        self._limit = chunk_bytes
        self._opened = False
        self._restarts = 0  # of the ranks, before this sync
        self._chunks: Sequence[WeightChunk] = ()
        self._handles = ""

    async def open(self, source: WeightSource) -> Sequence[WeightChunk]:
        if not self._opened:
            await self._senders.open_sender(CudaIpcSender)
            self._opened = True
        self._restarts = self._senders.restarts
        if isinstance(source, Path):
            opened = await self._senders.sender_call("open", str(source), self._limit)
        else:
            opened = await source.open_in_senders(self._limit)
        self._chunks = opened[0][0]
        self._handles = await self._senders.root_call("merge", [handle for _, handle in opened])
        return self._chunks

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        return [{"packed": True} for _ in workers]

    async def meet(self) -> None:
        pass

    async def load(self, index: int) -> Message:
        """Overwrite the previous chunk, which the workers have read by then."""
        require_same_ranks(self._senders, self._restarts)
        await self._senders.sender_call("load", index)
        return update_message(self._chunks[index], self._handles)

    async def send(self) -> None:
        pass

    async def close(self) -> None:
        self._chunks, self._handles = (), ""
        if self._opened:
            await self._senders.sender_call("close")

    async def leave(self) -> None:
        self.members = ()


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
