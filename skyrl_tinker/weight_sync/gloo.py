"""Transport to samplers on CPU, so far on this host: chunks are broadcast over TCP and staged in memory."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync.broadcast import BroadcastSender, BroadcastTransport
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import Message

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroupGloo

NAME = "gloo"
HOST = "127.0.0.1"  # the ranks of the trainer meet there as well
TIMEOUT_S = 60.0
"""Limit for the members to meet, and for one chunk: a member that hangs fails it for all."""
CONNECT_S = 5.0
"""Limit for reaching the sender's store, which is open before anybody is told of it; torch takes twice."""
MEETING_POLL_S = 0.02
LEFT = "left"
"""Key by which the sender tells those that wait for the others in `_meet`."""


class GlooSender(BroadcastSender):
    device = "cpu"

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._store: TCPStore | None = None

    def prepare(self) -> int:
        """Return the port at which the members meet."""
        self.leave()
        self._store = store = _open_store()
        return int(store.port)

    def meet(self, address: int, world: int) -> None:
        assert self._store is not None, "prepare() comes first"
        self._group = _join(self._store, HOST, address, 0, world)

    def broadcast(self, packed: "torch.Tensor") -> None:
        assert self._group is not None, "meet() comes first"
        _broadcast(self._group, packed)

    def leave(self) -> None:
        """Leave, also in the middle of `meet`; a broadcast that waits for a member ends at its timeout.

        The store stays until `close`, to tell members that come late: a replica samples nothing while torch
        tries to connect to a closed port.
        """
        self._group = None
        if self._store is not None:
            self._store.set(LEFT, "")

    def close(self) -> None:
        super().close()
        if self._group is None:
            self._store = None


class GlooTransport(BroadcastTransport):
    backend = "skyrl_staged"
    staged = True
    factory = GlooSender

    def join_message(self, address: int, rank_offset: int, world: int) -> Message:
        group = {"host": HOST, "port": address, "rank_offset": rank_offset, "world_size": world}
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

    def __init__(self, host: str, port: int, rank: int, world: int) -> None:
        self._group = _join(_connect_store(host, port), host, port, rank, world)

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


def _open_store() -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


def _connect_store(host: str, port: int) -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    return store


def _join(store: "TCPStore", host: str, port: int, rank: int, world: int) -> "ProcessGroupGloo":
    """Join a group beside the process's default one. SamplerError when not all come."""
    from torch.distributed import ProcessGroupGloo

    _meet(store, rank, world)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_local_address(host, port))]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return ProcessGroupGloo(store, rank, world, options)


def _meet(store: "TCPStore", rank: int, world: int) -> None:
    """Wait for all members: the group itself would wait for one that cannot come until its timeout."""
    store.set(f"member {rank}", "")
    deadline = time.monotonic() + TIMEOUT_S
    while not store.check([f"member {other}" for other in range(world)]):
        if store.check([LEFT]):
            raise SamplerError("the trainer gave up the group before all samplers had joined")
        if time.monotonic() > deadline:
            raise SamplerError(f"not all samplers joined within {TIMEOUT_S:.0f} s")
        time.sleep(MEETING_POLL_S)


def _local_address(host: str, port: int) -> str:
    """Return the address that leads to `host`; gloo otherwise listens where this host's name points."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _broadcast(group: Any, packed: "torch.Tensor") -> None:
    """Broadcast from rank 0; torch's stubs do not know this method of a group."""
    group.broadcast(packed, 0).wait()
