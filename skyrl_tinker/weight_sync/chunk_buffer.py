"""Send buffers: while one chunk is sent, the next is read. Imported in the trainer's ranks only."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch

from skyrl_tinker.weight_sync.chunks import WeightChunk, read_chunks


class ChunkSource(Protocol):
    """A version's tensors, chunk by chunk."""

    on_device: bool
    """Whether `fill` takes buffers on the device; if not, they are on the host."""

    @property
    def chunks(self) -> Sequence[WeightChunk]: ...

    def fill(self, index: int, buffer: torch.Tensor) -> None:
        """Write the bytes of a chunk to [size] uint8, on the current stream. Raises SkyrlTinkerError."""


class FileSource:
    """Source of a version's files. Raises SamplerError when they are damaged."""

    on_device = False

    def __init__(self, directory: Path, limit: int) -> None:
        self.chunks = read_chunks(directory, limit)

    def fill(self, index: int, buffer: torch.Tensor) -> None:
        self.chunks[index].read(buffer.numpy().data)


class ChunkBuffer:
    """Two buffers. On the CPU chunks are read into them, and sent from them, in turn.

    On CUDA they are read into the first, which is on the host (pinned) or the device as the source needs it,
    and copied to the second on the device. The first chunk is read immediately. Chunks must be loaded in
    their order, each once.
    """

    def __init__(self, source: ChunkSource, device: str) -> None:
        self.chunks = source.chunks
        self._source = source
        size = max(chunk.size for chunk in self.chunks)
        on_gpu = device == "cuda"
        place = device if source.on_device else "cpu"
        self._read_into = [
            torch.empty(size, dtype=torch.uint8, device=place, pin_memory=on_gpu and place == "cpu")
            for _ in range(1 if on_gpu else min(2, len(self.chunks)))
        ]
        self._device = torch.empty(size, dtype=torch.uint8, device=device) if on_gpu else None
        # On the default stream a copy would wait for all training that is queued.
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._reader = ThreadPoolExecutor(1, "weights")
        self._loading = Lock()
        self._next = 0
        self._reading = self._read(0)

    @property
    def exported(self) -> torch.Tensor:
        """Buffer on the device, which all chunks use in turn."""
        assert self._device is not None, "on CUDA only"
        return self._device

    def load(self, index: int) -> torch.Tensor:
        """Return [bytes of the chunk] uint8, valid until the next load; complete when this returns."""
        with self._loading:
            assert index == self._next, f"chunk {self._next} comes before {index}"
            loaded = self._sendable(self._reading.result())
            self._next += 1
            if self._next < len(self.chunks):
                self._reading = self._read(self._next)
        return loaded

    def close(self) -> None:
        """Stop reading; the buffers are freed when no chunk is referenced any more.

        A load in progress ends first: of ranks that read together, all or none must begin the next chunk.
        """
        with self._loading:
            self._reader.shutdown()

    def _sendable(self, read: torch.Tensor) -> torch.Tensor:
        if self._device is None:
            return read
        with self._own_stream():
            return self._device[: len(read)].copy_(read, non_blocking=True)

    def _read(self, index: int) -> Future[torch.Tensor]:
        return self._reader.submit(self._fill, index)

    def _fill(self, index: int) -> torch.Tensor:
        buffer = self._read_into[index % len(self._read_into)][: self.chunks[index].size]
        with self._own_stream():
            self._source.fill(index, buffer)
        return buffer

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Run the block on this buffer's stream, and wait until its work is done."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
