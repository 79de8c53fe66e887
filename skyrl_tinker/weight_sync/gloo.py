"""Transport to samplers on CPU, so far on this host: chunks are broadcast over TCP and staged in memory.

The members meet at a file in a directory of this user alone; once all have met, their ports let nobody in.
"""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.listeners import closing_new_listeners
from skyrl_tinker.weight_sync.broadcast import BroadcastSender, BroadcastTransport
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import Message

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import FileStore
    from torch.distributed import ProcessGroupGloo

NAME = "gloo"
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
"""Limit for the members to meet, and for one chunk: a member that hangs fails it for all."""
MEETING_POLL_S = 0.02
STORE = "store"
OPEN = "open"
"""File that the sender locks as long as it takes part, so that its death, too, is seen at once."""


class GlooSender(BroadcastSender):
    device = "cpu"

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._meeting: Path | None = None
        self._lock: IO[bytes] | None = None

    def prepare(self) -> str:
        """Return the directory in which the members meet, another one each time."""
        self.leave()
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)
        self._meeting = Path(tempfile.mkdtemp(prefix="gloo-"))
        self._lock = (self._meeting / OPEN).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return str(self._meeting)

    def meet(self, address: str, world: int) -> None:
        self._group = _join(Path(address), 0, world)

    def broadcast(self, packed: "torch.Tensor") -> None:
        assert self._group is not None, "meet() comes first"
        _broadcast(self._group, packed)

    def leave(self) -> None:
        """Leave, also in the middle of `meet`; a broadcast that waits for a member ends at its timeout.

        The directory stays until the next meeting, to tell members that come late.
        """
        self._group = None
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


class GlooTransport(BroadcastTransport):
    backend = "skyrl_staged"
    staged = True
    factory = GlooSender

    def join_message(self, address: str, rank_offset: int, world: int) -> Message:
        group = {"meeting": address, "rank_offset": rank_offset, "world_size": world}
        return {"transport": NAME, **group}

    def update_message(self, chunk: WeightChunk, *, last: bool) -> Message:
        return {
            "names": chunk.names,
            "shapes": chunk.shapes,
            "dtypes": chunk.dtypes,
            "sizes": chunk.sizes,
            "last": last,
        }


class GlooReceiver:
    """Receiver in vLLM. A chunk's memory is free again when its last tensor is loaded."""

    def __init__(self, meeting: str, rank: int, world: int) -> None:
        self._group = _join(Path(meeting), rank, world)

    def receive(self, update: Any) -> Mapping[str, "Callable[[], torch.Tensor]"]:
        """Take part in the broadcast whatever the message says, so that no member waits for this worker."""
        import torch

        packed = torch.empty(sum(update.sizes), dtype=torch.uint8)
        _broadcast(self._group, packed)
        parts: Sequence[torch.Tensor] = packed.split(update.sizes)  # type: ignore[no-untyped-call]
        described = zip(update.names, update.dtypes, update.shapes, parts, strict=True)
        return {name: _typed(part, dtype, shape) for name, dtype, shape, part in described}

    def forget(self) -> None:
        pass


def _typed(part: "torch.Tensor", dtype: str, shape: list[int]) -> "Callable[[], torch.Tensor]":
    import torch

    tensor = part.view(getattr(torch, dtype)).view(shape)
    return lambda: tensor


def _join(meeting: Path, rank: int, world: int) -> "ProcessGroupGloo":
    """Join a group beside the process's default one. SamplerError when not all come."""
    from torch._C._distributed_c10d import FileStore
    from torch.distributed import ProcessGroupGloo

    store = FileStore(str(meeting / STORE))
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    _meet(store, meeting / OPEN, rank, world)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    with closing_new_listeners():
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        return ProcessGroupGloo(store, rank, world, options)


def _meet(store: "FileStore", door: Path, rank: int, world: int) -> None:
    """Wait for all members: the group itself would wait for one that cannot come until its timeout."""
    deadline = time.monotonic() + TIMEOUT_S
    _require_open(door)
    store.set(f"member {rank}", "")
    while not store.check([f"member {other}" for other in range(world)]):
        _require_open(door)
        if time.monotonic() > deadline:
            raise SamplerError(f"not all samplers joined within {TIMEOUT_S:.0f} s")
        time.sleep(MEETING_POLL_S)


def _require_open(door: Path) -> None:
    """Raise SamplerError when the sender, which locks this file, has left or died."""
    try:
        with door.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except FileNotFoundError:
        pass
    raise SamplerError("the trainer gave up the group before all samplers had joined")


def _broadcast(group: Any, packed: "torch.Tensor") -> None:
    """Broadcast from rank 0; torch's stubs do not know this method of a group."""
    group.broadcast(packed, 0).wait()
