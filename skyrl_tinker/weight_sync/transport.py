"""Interfaces of full-parameter weight sync: transports, senders, replicas, and the sync's error."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from skyrl_tinker.domain.values import Way
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync.chunks import WeightChunk

Message = Mapping[str, Any]
"""JSON object that is sent to the workers of a replica."""

SyncPhase = Literal["open", "init", "pause", "start", "update", "finish"]


class CapturedWeights(Protocol):
    """A version's weights while the trainer's ranks hold them: `training.captured_state.CapturedState`."""

    async def open_in_senders(self, limit: int) -> list[Any]:
        """Call `open_captured(share, limit)` of each rank's sender with that rank's share.

        Results by rank. Raises TrainerError when a rank has died.
        """
        ...


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
    members: tuple[str, ...]
    """The replicas that `meet` brought together, () for none."""

    async def open(self, source: WeightSource) -> Sequence[WeightChunk]:
        """Return the chunks in the order to send. SamplerError when a directory holds no weights.

        `members` becomes () where the trainer has been restarted since: it is in no group.
        """
        ...

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        """Return the init message of each replica, given how many workers each has."""
        ...

    async def meet(self) -> None:
        """Do the trainer's part of init, while the replicas run their init calls."""
        ...

    async def load(self, index: int) -> Message:
        """Make the chunk ready to send; return the update message of every replica.

        From `open` on the next chunk is read ahead, so that this takes little time.
        """
        ...

    async def send(self) -> None:
        """Do the trainer's part of an update, while the replicas run their update calls."""
        ...

    async def close(self) -> None:
        """Release the source and the buffers for it."""
        ...

    async def leave(self) -> None:
        """Leave the group, so that no replica waits for the trainer any more; `members` becomes ().

        May be called during `meet` or `send`, which then fail as soon as the backend allows.
        """
        ...


class Senders(Protocol):
    """The trainer's ranks as senders: `training.trainer_group.TrainerGroup`."""

    async def open_sender(self, factory: Callable[[int], Any]) -> None:
        """Make the sender `factory(rank)` in every rank."""
        ...

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all senders; results by rank."""
        ...

    async def root_call(self, method: str, *args: Any) -> Any:
        """Call a method of rank 0's sender."""
        ...


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
