"""Interfaces of full-parameter weight sync: transports, senders, replicas; the sync's error."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from skyrl_tinker.domain.values import Way
from skyrl_tinker.errors import NotSupportedError, SamplerError, TrainerError
from skyrl_tinker.weight_sync.chunks import WeightChunk

if TYPE_CHECKING:
    import torch

    from skyrl_tinker.weight_sync.captured_chunks import CapturedShare
    from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer, ChunkSource

Message = Mapping[str, Any]
"""JSON object that is sent to the workers of a replica."""

LOOPBACK = "127.0.0.1"
SyncPhase = Literal["open", "init", "pause", "start", "update", "finish"]


class NoSenders:
    """Raises NotSupportedError when a transport needs the ranks of a trainer."""

    restarts = 0

    def __init__(self, base_model: str) -> None:
        self._base_model = base_model

    async def open_sender(self, factory: Callable[[int], Any]) -> None:
        self._refuse()

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        self._refuse()

    async def root_call(self, method: str, *args: Any) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotSupportedError(
            f"full parameters of base model {self._base_model!r} cannot be sampled: it is served for sampling"
            " only, and their transport (setting weight_transport) needs the ranks of its trainer"
        )


class CapturedWeights(Protocol):
    """A version's weights while the trainer's ranks hold them: `training.captured_state.CapturedState`."""

    async def open_in_senders(self, limit: int) -> list[Any]:
        """Call `open_captured(share, limit)` of each rank's sender with that rank's share.

        Results by rank. Raises TrainerError when a rank has died.
        """


WeightSource = Path | CapturedWeights
"""A directory of safetensors, or a full model's weights captured by the ranks."""


class WeightTransport(Protocol):
    """One way to bring a version's tensors to the replicas, chunk by chunk.

    A sync calls `open`; `form` and `meet` if the replicas are not `members` after it; per chunk, in order,
    `load` and `send`; `close` in any case. Every call may raise SkyrlTinkerError.
    """

    backend: str
    """The backend that a sampler's weight transfer, or a group of torch, must name."""
    staged: bool
    """Whether replicas serve the old weights until the update is finished; if not, they must be paused from
    start to finish, and have no usable weights if it fails."""
    takes_captured: bool
    """Whether `open` takes CapturedWeights; if not, files only."""
    ways: tuple[Way, Way]
    """The way to replicas of this host, and to those of others."""
    members: tuple[str, ...] = ()
    """The replicas that `meet` brought together, () for none."""

    async def open(self, source: WeightSource) -> Sequence[WeightChunk]:
        """Return the chunks in the order to send. SamplerError when a directory holds no weights.

        `members` becomes () where the trainer has been restarted since: it is in no group.
        """

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        """Return the init message of each replica, given how many workers each has."""

    async def meet(self) -> None:
        """Do the trainer's part of init, while the replicas run their init calls; by default nothing."""
        return

    async def load(self, index: int) -> Message:
        """Make the chunk ready to send; return the update message of every replica.

        From `open` on the next chunk is read ahead, so that this takes little time.
        """

    async def send(self) -> None:
        """Do the trainer's part of an update, while the replicas run their update calls; likewise."""
        return

    async def close(self) -> None:
        """Release the source and the buffers for it."""

    async def leave(self) -> None:
        """Leave the group, so that no replica waits for the trainer any more; `members` becomes ().

        May be called during `meet` or `send`, which then fail as soon as the backend allows.
        """
        self.members = ()


class Senders(Protocol):
    """The trainer's ranks as senders: `training.trainer_group.TrainerGroup`."""

    @property
    def restarts(self) -> int:
        """Times that the ranks were replaced, by others whose senders have opened nothing."""

    async def open_sender(self, factory: Callable[[int], Any]) -> None:
        """Make the sender `factory(rank)` in every rank."""

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all senders; results by rank."""

    async def root_call(self, method: str, *args: Any) -> Any:
        """Call a method of rank 0's sender."""


class SenderTransport(WeightTransport):
    """Transport with a sender in each rank of the trainer, made by `factory(rank)`."""

    factory: Callable[[int], "ChunkSender"]
    sender: type["ChunkSender"]
    takes_captured = True

    def __init__(self, senders: Senders, chunk_bytes: int, host: str = LOOPBACK) -> None:
        """`host`: address of rank 0's host, loopback where all members are on it."""
        self.factory = partial(self.sender, host=host)
        self._senders = senders
        self.limit = chunk_bytes
        self._opened = False
        self._restarts = 0  # of the ranks, before this sync
        self._chunks: Sequence[WeightChunk] = ()

    async def _open(self, source: WeightSource) -> list[Any]:
        """Open the source in the senders that read it; their replies."""
        if not self._opened:
            await self._senders.open_sender(self.factory)
            self._opened = True
        self._restarts = self._senders.restarts
        if isinstance(source, Path):
            return await self._open_files(str(source))
        return await source.open_in_senders(self.limit)

    async def _open_files(self, directory: str) -> list[Any]:
        return await self._senders.sender_call("open", directory, self.limit)

    def _require_same_ranks(self) -> None:
        """Raise TrainerError if the ranks that opened the source were replaced."""
        if self._senders.restarts != self._restarts:
            raise TrainerError("the ranks died during a sync of weights, and fresh ones take no part in it")

    async def close(self) -> None:
        self._chunks = ()
        if self._opened:
            await self._senders.sender_call("close")


class ChunkSender(ABC):
    """Sender in a rank of the trainer. `everywhere`: all ranks get the bytes of captured chunks."""

    device: str
    everywhere = False

    def __init__(self, rank: int, host: str = LOOPBACK) -> None:
        """`host`: address at which members on other hosts reach this one."""
        self._host = host
        self._buffer: ChunkBuffer | None = None
        self._loaded: torch.Tensor | None = None

    def open(self, directory: str, limit: int) -> Any:
        """Open a version's files. Raises SamplerError when they are missing or damaged."""
        from skyrl_tinker.weight_sync.chunk_buffer import FileSource

        return self._open(FileSource(Path(directory), limit))

    def open_captured(self, share: "CapturedShare", limit: int) -> Any:
        """Open this rank's captured weights, at the same time as the other ranks."""
        from skyrl_tinker.weight_sync.captured_chunks import CapturedSource

        return self._open(CapturedSource(share, limit, everywhere=self.everywhere))

    def load(self, index: int) -> None:
        assert self._buffer is not None, "open() comes first"
        self._loaded = self._buffer.load(index)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = self._loaded = None

    @abstractmethod
    def _open(self, source: "ChunkSource") -> Any:
        """Return the chunks, and what the transport needs beside them."""

    def _buffered(self, source: "ChunkSource") -> "ChunkBuffer":
        from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer

        self._buffer = ChunkBuffer(source, self.device)
        return self._buffer


class Replica(Protocol):
    """The control plane of one replica. Every call may raise SamplerError."""

    async def health(self) -> None: ...
    async def world_size(self) -> int: ...
    async def pause(self, mode: Literal["abort", "wait", "keep"], *, clear_cache: bool) -> None: ...
    async def reset_prefix_cache(self) -> None: ...
    async def resume(self) -> None: ...
    async def set_weight_version(self, version: str) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...
    async def init_weight_transfer_engine(self, info: Message) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, info: Message) -> None: ...
    async def finish_weight_update(self, version: str) -> None: ...


class WeightUpdateTarget(Protocol):
    @property
    def server_urls(self) -> tuple[str, ...]: ...

    def replica(self, url: str) -> Replica: ...


class WeightSyncError(SamplerError):
    """Failed sync. `failed`: replicas that refused or died; empty if the trainer or a file was at fault.

    `lost`: replicas to replace, which do not serve the old weights either: they hold part of the new ones,
    stay paused or are dead.
    """

    def __init__(
        self, message: str, phase: SyncPhase, failed: Sequence[str] = (), lost: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.phase: SyncPhase = phase
        self.failed = tuple(failed)
        self.lost = tuple(lost)
