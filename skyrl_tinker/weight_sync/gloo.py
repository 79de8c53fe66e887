"""Transport to samplers on CPU: chunks are broadcast over TCP and staged in memory.

Members on one host meet at a file in a directory private to this user; on several hosts, at a port of the
sender's address, on a network that must be private. Once all have met, no port accepts a connection.
"""

import fcntl
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.values import Way
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.system.interfaces import address_towards
from skyrl_tinker.system.listeners import closing_new_listeners
from skyrl_tinker.weight_sync.broadcast import BroadcastSender, BroadcastTransport
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import LOOPBACK, Message

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroupGloo

NAME = "gloo"
TIMEOUT = timedelta(seconds=60)
"""Limit for the members to meet, and for one chunk. A member that hangs fails the broadcast for all."""
CONNECT_S = 10.0
MEETING_POLL_S = 0.02
STORE = "store"
OPEN = "open"
GAVE_UP = "the trainer gave up the group before all samplers had joined"


class GlooSender(BroadcastSender):
    device = "cpu"
    _meeting: "_FileMeeting | PortMeeting | None" = None

    def prepare(self) -> str:
        """Return the address at which the members meet, a new one for each meeting."""
        self.leave()
        if isinstance(self._meeting, _FileMeeting):
            self._meeting.remove()
        self._meeting = _FileMeeting() if self._host == LOOPBACK else PortMeeting(self._host)
        return self._meeting.address

    def meet(self, address: str, world: int) -> None:
        self._group = _join(address, 0, world)
        if isinstance(self._meeting, PortMeeting):
            self._meeting.end(world)

    def broadcast(self, packed: "torch.Tensor") -> None:
        assert self._group is not None, "meet() comes first"
        _broadcast(self._group, packed)

    def leave(self) -> None:
        """Leave the group, even during `meet`; a broadcast that waits for a member ends at its timeout.

        The directory of a meeting at a file stays until the next meeting, so that late members see it closed.
        """
        self._group = None
        if self._meeting is not None:
            self._meeting.close()


class GlooTransport(BroadcastTransport):
    backend = "skyrl_staged"
    staged = True
    ways: tuple[Way, Way] = ("gloo", "gloo")
    sender = GlooSender

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
    """Receiver in a sampler. A chunk's memory is free again when its last tensor is loaded."""

    def __init__(self, meeting: str, rank: int, world: int) -> None:
        self._group = _join(meeting, rank, world)

    def receive(self, update: Any) -> Mapping[str, "Callable[[], torch.Tensor]"]:
        """Take part in the broadcast before checking the message, so that no member waits for this worker."""
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


class _FileMeeting:
    """A directory; the sender locks a file in it while it takes part, so that its death is seen at once."""

    def __init__(self) -> None:
        self.address = tempfile.mkdtemp(prefix="gloo-")
        self._lock = (Path(self.address) / OPEN).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        self._lock.close()

    def remove(self) -> None:
        shutil.rmtree(self.address, ignore_errors=True)


class PortMeeting:
    """A store on a port, which is closed when the sender leaves or dies."""

    def __init__(self, host: str) -> None:
        from torch._C._distributed_c10d import TCPStore

        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store: Any = TCPStore(
            host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def end(self, world: int) -> None:
        """Close the port once all members are in the group. Raises SamplerError when one does not join."""
        try:
            self._store.wait([f"joined {rank}" for rank in range(world)], TIMEOUT)
        except RuntimeError as error:
            raise SamplerError("a sampler that had come did not join the group") from error
        self.close()

    def close(self) -> None:
        self._store = None


def _join(meeting: str, rank: int, world: int) -> "ProcessGroupGloo":
    """Join a group apart from the process's default one. Raises SamplerError when a member is missing."""
    if meeting.startswith("/"):
        store, host, require_open = _open_file(Path(meeting))
    else:
        store, host, require_open = open_port(meeting)
    try:
        _meet(store, require_open, rank, world)
    except RuntimeError as error:  # the connection broke
        raise SamplerError(GAVE_UP) from error
    group = join_gloo(store, host, rank, world)
    store.set(f"joined {rank}", "")
    return group


def join_gloo(store: "Store", host: str, rank: int, world: int) -> "ProcessGroupGloo":
    """Make a group with the others at its store, over an address of this host."""
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = TIMEOUT
    with closing_new_listeners():
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        return ProcessGroupGloo(store, rank, world, options)


def _open_file(meeting: Path) -> "tuple[Store, str, Callable[[], None]]":
    """Return a meeting's store, the address to listen on, and a check that the sender has not left."""
    from torch._C._distributed_c10d import FileStore

    store = FileStore(str(meeting / STORE))
    store.set_timeout(TIMEOUT)
    return store, LOOPBACK, partial(_require_open, meeting / OPEN)


def open_port(meeting: str) -> "tuple[Store, str, Callable[[], None]]":
    """Return the same for a meeting at a port, whose store itself fails when the sender leaves."""
    from torch._C._distributed_c10d import TCPStore

    host, _, port = meeting.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()  # the store retries until its timeout
        store = TCPStore(host, int(port), None, False, TIMEOUT, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise SamplerError(GAVE_UP) from error
    return store, address_towards(f"tcp://{meeting}") or host, lambda: None


def _meet(store: "Store", require_open: Callable[[], None], rank: int, world: int) -> None:
    """Wait for all members: the group itself would wait for a dead one until its timeout."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    require_open()
    store.set(f"member {rank}", "")
    while not store.check([f"member {other}" for other in range(world)]):
        require_open()
        if time.monotonic() > deadline:
            raise SamplerError(f"not all samplers joined within {TIMEOUT.total_seconds():.0f} s")
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
    raise SamplerError(GAVE_UP)


def _broadcast(group: Any, packed: "torch.Tensor") -> None:
    """Broadcast from rank 0; torch's stubs do not know this method of a group."""
    group.broadcast(packed, 0).wait()
