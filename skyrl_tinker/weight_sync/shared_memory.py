"""Transport to samplers that map a version's files in their host's tmpfs; only file names are sent."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.values import Way
from skyrl_tinker.weight_sync.chunks import StoredChunk, read_chunks
from skyrl_tinker.weight_sync.transport import Message, WeightSource, WeightTransport

if TYPE_CHECKING:
    import torch

NAME = "shared_memory"


class SharedMemoryTransport(WeightTransport):
    """Transport that sends no bytes, and so has no sender.

    The files must not change while they are read; they may be removed when the sync is over. The base model's
    own directory is a valid source, to go back to the base.
    """

    backend = "skyrl_staged"
    staged = True
    takes_captured = False
    ways: tuple[Way, Way] = ("shared memory", "pull")

    def __init__(self, chunk_bytes: int) -> None:
        self._limit = chunk_bytes
        self._directory = ""
        self._chunks: Sequence[StoredChunk] = ()

    async def open(self, source: WeightSource) -> Sequence[StoredChunk]:
        assert isinstance(source, Path), "files only: takes_captured says so"
        self._directory = str(source.absolute())
        self._chunks = await asyncio.to_thread(read_chunks, source, self._limit)
        return self._chunks

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        return [{"transport": NAME} for _ in workers]

    async def load(self, index: int) -> Message:
        chunk = self._chunks[index]
        files = [Path(entry.file).name for entry in chunk.entries]
        last = index == len(self._chunks) - 1
        where = {"directory": self._directory, "files": files}
        return {"names": chunk.names, "shapes": chunk.shapes, **where, "last": last}

    async def close(self) -> None:
        self._chunks = ()


class MappedFiles:
    """Receiver in a sampler. Tensors are read when they are loaded, so staging them takes no memory."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def receive(self, update: Any) -> Mapping[str, "Callable[[], torch.Tensor]"]:
        """Open the files. Raises SafetensorError for a damaged file, or if a tensor is not in it."""
        named = zip(update.names, update.files, strict=True)
        return {name: self._tensor(f"{update.directory}/{file}", name) for name, file in named}

    def forget(self) -> None:
        self._files = {}

    def _tensor(self, path: str, name: str) -> "Callable[[], torch.Tensor]":
        from safetensors import safe_open

        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        file = self._files[path]
        file.get_slice(name)
        return lambda: file.get_tensor(name)
