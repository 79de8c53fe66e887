"""Common part of gloo and NCCL: rank 0 of the trainer broadcasts each chunk to all replicas' workers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_tinker.errors import TrainerError
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import Message, Senders

if TYPE_CHECKING:
    import torch

    from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer


class BroadcastTransport(ABC):
    """Engine's side. The group is the sender as rank 0, then the workers of each replica in turn."""

    factory: Callable[[int], "BroadcastSender"]

    def __init__(self, senders: Senders, chunk_bytes: int) -> None:
        self.members: tuple[str, ...] = ()
        self._senders = senders
        self.limit = chunk_bytes
        self._opened = False
        self._chunks: Sequence[WeightChunk] = ()
        self._rendezvous: tuple[Any, ...] = ()

    async def open(self, directory: Path) -> Sequence[WeightChunk]:
        if not self._opened:
            await self._senders.open_sender(self.factory, every_rank=False)
            self._opened = True
        self._chunks, joined = await self._call("open", str(directory), self.limit)
        if not joined:
            self.members = ()
        return self._chunks

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        world = 1 + sum(workers)
        address = await self._call("prepare")
        self._rendezvous = (address, world)
        offsets = [1 + sum(workers[:replica]) for replica in range(len(workers))]
        return [self.join_message(address, offset, world) for offset in offsets]

    async def meet(self) -> None:
        await self._call("meet", *self._rendezvous)

    async def load(self, index: int) -> Message:
        await self._call("load", index)
        return self.update_message(self._chunks[index], last=index == len(self._chunks) - 1)

    async def send(self) -> None:
        await self._call("send")

    async def close(self) -> None:
        self._chunks = ()
        if self._opened:
            await self._call("close")

    async def leave(self) -> None:
        self.members = ()
        if self._opened:
            with suppress(TrainerError):  # a dead rank is in no group
                await self._call("leave")

    @abstractmethod
    def join_message(self, address: Any, rank_offset: int, world: int) -> Message:
        """Make the init message of a replica whose first worker has rank `rank_offset`."""

    @abstractmethod
    def update_message(self, chunk: WeightChunk, *, last: bool) -> Message: ...

    async def _call(self, method: str, *args: Any) -> Any:
        (result,) = await self._senders.sender_call(method, *args)
        return result


class BroadcastSender(ABC):
    """Sender in rank 0 of the trainer, in threads of its own: one that waits, one for `leave`."""

    device: str

    def __init__(self, rank: int) -> None:
        self._buffer: ChunkBuffer | None = None
        self._loaded: torch.Tensor | None = None
        self._group: Any = None  # of `meet`

    def open(self, directory: str, limit: int) -> tuple[Sequence[WeightChunk], bool]:
        """Open a version; return its chunks, and whether this sender is in a group.

        SamplerError when the directory holds no whole files.
        """
        from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer

        self._buffer = ChunkBuffer(Path(directory), limit, self.device)
        return self._buffer.chunks, self._group is not None

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
        """Close the connections, also while another thread waits in them; harmless without any."""
