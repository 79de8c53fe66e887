"""Send buffer: one chunk of one version at a time. Imported in the trainer's ranks only."""

from collections.abc import Sequence
from pathlib import Path

import torch

from skyrl_tinker.weight_sync.chunks import WeightChunk, read_chunks


class ChunkBuffer:
    """Buffer for one chunk. On CUDA the bytes pass through pinned host memory of the same size."""

    def __init__(self, directory: Path, limit: int, device: str) -> None:
        self.chunks: Sequence[WeightChunk] = read_chunks(directory, limit)
        size = max(chunk.size for chunk in self.chunks)
        on_gpu = device == "cuda"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self.whole = torch.empty(size, dtype=torch.uint8, device=device) if on_gpu else self._host

    def load(self, index: int) -> torch.Tensor:
        """Return [bytes of the chunk] uint8, valid until the next load; complete when this returns."""
        chunk = self.chunks[index]
        host = self._host[: chunk.size]
        chunk.read(host.numpy().data)
        loaded = self.whole[: chunk.size]
        if loaded.device.type == "cuda":
            loaded.copy_(host)
            torch.cuda.current_stream().synchronize()
        return loaded


def unpack(packed: torch.Tensor, chunk: WeightChunk) -> dict[str, torch.Tensor]:
    """Return views of [bytes] uint8 as the tensors of the chunk."""
    parts = packed[: chunk.size].split(chunk.sizes)  # type: ignore[no-untyped-call]
    return {
        entry.name: part.view(getattr(torch, entry.dtype)).view(entry.shape)
        for entry, part in zip(chunk.entries, parts, strict=True)
    }
