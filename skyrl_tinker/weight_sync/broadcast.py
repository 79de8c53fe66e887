"""Common part of gloo and NCCL: rank 0 of the trainer broadcasts each chunk to all replicas' workers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_tinker.errors import TrainerError
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import (
    CapturedWeights,
    Message,
    Senders,
    WeightSource,
    require_same_ranks,
)

if TYPE_CHECKING:
    import torch

    from skyrl_tinker.weight_sync.captured_chunks import CapturedShare
    from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer, ChunkSource

Opened = tuple[Sequence[WeightChunk], bool]
"""Chunks of a version, and whether the sender is in a group."""


class BroadcastTransport(ABC):
    """Engine's side. The group is rank 0's sender, as rank 0, then the workers of each replica in turn.

    Rank 0's sender alone reads files; captured weights are read by all senders and passed on to rank 0's.
    """

    factory: Callable[[int], "BroadcastSender"]
    takes_captured = True

    def __init__(self, senders: Senders, chunk_bytes: int) -> None:
        self.members: tuple[str, ...] = ()
        self._senders = senders
        self.limit = chunk_bytes
        self._opened = False
        self._restarts = 0  # of the ranks, before this sync
        self._chunks: Sequence[WeightChunk] = ()
        self._rendezvous: tuple[Any, ...] = ()
        self._read = senders.root_call

    async def open(self, source: WeightSource) -> Sequence[WeightChunk]:
        if not self._opened:
            await self._senders.open_sender(self.factory)
            self._opened = True
        self._restarts = self._senders.restarts
        opening = self._open_files(source) if isinstance(source, Path) else self._open_captured(source)
        self._chunks, joined = await opening
        if not joined:
            self.members = ()
        return self._chunks

    async def _open_files(self, directory: Path) -> Opened:
        self._read = self._senders.root_call
        opened: Opened = await self._senders.root_call("open", str(directory), self.limit)
        return opened

    async def _open_captured(self, weights: CapturedWeights) -> Opened:
        self._read = self._senders.sender_call
        opened: Opened = (await weights.open_in_senders(self.limit))[0]
        return opened

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        world = 1 + sum(workers)
        require_same_ranks(self._senders, self._restarts)
        address = await self._senders.root_call("prepare")
        self._rendezvous = (address, world)
        offsets = [1 + sum(workers[:replica]) for replica in range(len(workers))]
        return [self.join_message(address, offset, world) for offset in offsets]

    async def meet(self) -> None:
        require_same_ranks(self._senders, self._restarts)
        await self._senders.root_call("meet", *self._rendezvous)

    async def load(self, index: int) -> Message:
        require_same_ranks(self._senders, self._restarts)
        await self._read("load", index)
        return self.update_message(self._chunks[index], last=index == len(self._chunks) - 1)

    async def send(self) -> None:
        require_same_ranks(self._senders, self._restarts)
        await self._senders.root_call("send")

    async def close(self) -> None:
        self._chunks = ()
        if self._opened:
            await self._senders.sender_call("close")

    async def leave(self) -> None:
        self.members = ()
        if self._opened:
            with suppress(TrainerError):  # a dead rank is in no group
                await self._senders.root_call("leave")

    @abstractmethod
    def join_message(self, address: Any, rank_offset: int, world: int) -> Message:
        """Make the init message of a replica whose first worker has rank `rank_offset`."""

    @abstractmethod
    def update_message(self, chunk: WeightChunk, *, last: bool) -> Message: ...


class BroadcastSender(ABC):
    """Sender in a rank of the trainer, in separate threads: one that waits, one for `leave`.

    Rank 0's sender is in the group; the others only help it to read captured weights.
    """

    device: str

    def __init__(self, rank: int) -> None:
        self._buffer: ChunkBuffer | None = None
        self._loaded: torch.Tensor | None = None
        self._group: Any = None  # made by `meet`

    def open(self, directory: str, limit: int) -> Opened:
        """Open a version's files. Raises SamplerError when they are missing or damaged."""
        from skyrl_tinker.weight_sync.chunk_buffer import FileSource

        return self._open(FileSource(Path(directory), limit))

    def open_captured(self, share: "CapturedShare", limit: int) -> Opened:
        """Open this rank's captured weights, at the same time as the other ranks."""
        from skyrl_tinker.weight_sync.captured_chunks import CapturedSource

        return self._open(CapturedSource(share, limit, everywhere=False))

    def load(self, index: int) -> None:
        assert self._buffer is not None, "open() comes first"
        self._loaded = self._buffer.load(index)

    def send(self) -> None:
        assert self._loaded is not None, "load() comes first"
        self.broadcast(self._loaded)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = self._loaded = None

    def _open(self, source: "ChunkSource") -> Opened:
        from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer

        self._buffer = ChunkBuffer(source, self.device)
        return self._buffer.chunks, self._group is not None

    @abstractmethod
    def prepare(self) -> Any:
        """Return the address at which the members meet: plain data for `join_message`."""

    @abstractmethod
    def meet(self, address: Any, world: int) -> None: ...

    @abstractmethod
    def broadcast(self, packed: "torch.Tensor") -> None:
        """Send [bytes] uint8 to all others; it may be overwritten when this returns."""

    @abstractmethod
    def leave(self) -> None:
        """Close the connections, even while another thread waits in them; harmless if there are none."""
