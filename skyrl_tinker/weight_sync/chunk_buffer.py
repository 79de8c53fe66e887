"""Send buffers: while one chunk is sent, the next is read. Imported in the trainer's ranks only."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from skyrl_tinker.weight_sync.chunks import WeightChunk, read_chunks


class ChunkBuffer:
    """Two buffers for chunks on the host, pinned on CUDA; there, a third one on the device is sent from.

    Reading begins at once, with the first chunk. Chunks are loaded in their order, each once.
    """

    def __init__(self, directory: Path, limit: int, device: str) -> None:
        self.chunks: Sequence[WeightChunk] = read_chunks(directory, limit)
        size = max(chunk.size for chunk in self.chunks)
        on_gpu = device == "cuda"
        self._hosts = [
            torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(min(2, len(self.chunks)))
        ]
        self._device = torch.empty(size, dtype=torch.uint8, device=device) if on_gpu else None
        # On the default stream a copy would wait for all training that is queued.
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._reader = ThreadPoolExecutor(1, "weights")
        self._next = 0
        self._reading = self._read(0)

    @property
    def exported(self) -> torch.Tensor:
        """Buffer on the device: that of all chunks in turn."""
        assert self._device is not None, "on CUDA only"
        return self._device

    def load(self, index: int) -> torch.Tensor:
        """Return [bytes of the chunk] uint8, valid until the next load; complete when this returns."""
        assert index == self._next, f"chunk {self._next} comes before {index}"
        host = self._reading.result()
        self._next += 1
        if self._next < len(self.chunks):
            self._reading = self._read(self._next)
        return host if self._device is None else self._copy(host)

    def close(self) -> None:
        """Stop reading; the buffers are free once nobody holds a chunk."""
        self._reader.shutdown(cancel_futures=True)

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            loaded = self.exported[: len(host)].copy_(host, non_blocking=True)
        self._stream.synchronize()
        return loaded

    def _read(self, index: int) -> Future[torch.Tensor]:
        return self._reader.submit(self._fill, index)

    def _fill(self, index: int) -> torch.Tensor:
        chunk = self.chunks[index]
        host = self._hosts[index % 2][: chunk.size]
        chunk.read(host.numpy().data)
        return host


def unpack(packed: torch.Tensor, chunk: WeightChunk) -> dict[str, torch.Tensor]:
    """Return views of [bytes] uint8 as the tensors of the chunk."""
    parts = packed[: chunk.size].split(chunk.sizes)  # type: ignore[no-untyped-call]
    return {
        entry.name: part.view(getattr(torch, entry.dtype)).view(entry.shape)
        for entry, part in zip(chunk.entries, parts, strict=True)
    }
