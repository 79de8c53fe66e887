"""Common part of gloo and NCCL: rank 0 of the trainer broadcasts each chunk to all replicas' workers."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from skyrl_tinker.errors import TrainerError
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import ChunkSender, Message, SenderTransport, WeightSource

if TYPE_CHECKING:
    import torch

    from skyrl_tinker.weight_sync.chunk_buffer import ChunkSource


class BroadcastTransport(SenderTransport):
    """Engine's side. The group is rank 0's sender, as rank 0, then the workers of each replica in turn.

    Rank 0's sender alone reads files; captured weights are read by all senders and passed on to rank 0's.
    """

    _rendezvous: tuple[Any, ...]
    _read: Callable[..., Awaitable[Any]]

    async def open(self, source: WeightSource) -> Sequence[WeightChunk]:
        self._read = self._senders.sender_call
        self._chunks, joined = (await self._open(source))[0]
        if not joined:
            self.members = ()
        return self._chunks

    async def _open_files(self, directory: str) -> list[Any]:
        self._read = self._senders.root_call
        return [await self._read("open", directory, self.limit)]

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        world = 1 + sum(workers)
        self._require_same_ranks()
        address = await self._senders.root_call("prepare")
        self._rendezvous = (address, world)
        offsets = [1 + sum(workers[:replica]) for replica in range(len(workers))]
        return [self.join_message(address, offset, world) for offset in offsets]

    async def meet(self) -> None:
        self._require_same_ranks()
        await self._senders.root_call("meet", *self._rendezvous)

    async def load(self, index: int) -> Message:
        self._require_same_ranks()
        await self._read("load", index)
        return self.update_message(self._chunks[index], last=index == len(self._chunks) - 1)

    async def send(self) -> None:
        self._require_same_ranks()
        await self._senders.root_call("send")

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


class BroadcastSender(ChunkSender):
    """Sender in separate threads of a rank: one that waits, one for `leave`.

    Rank 0's sender is in the group; the others only help it to read captured weights.
    """

    _group: Any = None  # made by `meet`

    def send(self) -> None:
        assert self._loaded is not None, "load() comes first"
        self.broadcast(self._loaded)

    def _open(self, source: "ChunkSource") -> tuple[Sequence[WeightChunk], bool]:
        """Return the chunks, and whether this sender is in a group."""
        return self._buffered(source).chunks, self._group is not None

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
