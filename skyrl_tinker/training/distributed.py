"""Process group of the ranks: gloo on CPU, NCCL on CUDA.

Security: ranks of one host meet at a private file; ranks of several hosts meet at a port of rank 0's address,
on a network that must be private. The ports of the meeting and of gloo require no token; they accept no
connection once all ranks have met, and data received through them is never unpickled.
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyrl_tinker import errors
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.system.listeners import closing_new_listeners

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of a process among its peers.

    `transfers`: group for collectives in another thread, beside those of units; None with one rank. It is of
    gloo on GPUs too: NCCL may hang if two groups' collectives come in other orders on other ranks
    (NVIDIA/nccl#195), and two threads have no order.
    """

    rank: int
    world: int
    mesh: DeviceMesh
    transfers: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def broadcast_(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite the tensor, contiguous and of one shape on all ranks, by that of rank `source`."""
        if self.world > 1:
            dist.broadcast(tensor, source)

    def any_(self, flags: list[bool]) -> list[bool]:
        """Reduce flags element-wise: true where the flag is set on any rank."""
        if self.world == 1 or not flags:
            return flags
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(counts)
        return [bool(count) for count in counts.tolist()]

    def together(self, check: Callable[[], T]) -> T:
        """Return the check's value; if it raises a SkyrlTinkerError on one rank, all ranks raise the same."""
        error: SkyrlTinkerError | None = None
        try:
            value = check()
        except SkyrlTinkerError as refused:
            error = refused
        failed = any(self.any_([error is not None]))
        for rank, content in enumerate(self._gather(_encoded(error)) if failed else ()):
            if content:
                raise error if error is not None and rank == self.rank else _decoded(content)
        return value

    def _gather(self, content: bytes) -> list[bytes]:
        """Return the content of every rank, in their order."""
        if self.world == 1:
            return [content]
        sizes = self._gather_tensors(torch.tensor([len(content)]))
        padded = content.ljust(int(max(sizes)), b"\0") + b"\0"  # never empty
        rows = self._gather_tensors(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        return [bytes(row[: int(size)].tolist()) for row, size in zip(rows, sizes, strict=True)]

    def _gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of every rank; all have the same shape."""
        mine = tensor.to(self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(gathered, mine)
        return gathered


def _encoded(error: SkyrlTinkerError | None) -> bytes:
    return b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()


def _decoded(content: bytes) -> SkyrlTinkerError:
    name, message = json.loads(content)
    error: SkyrlTinkerError = getattr(errors, name)(message)
    return error


class MeetingPlace(Protocol):
    """Place at which the ranks find each other. Plain data, for all of them."""

    def open(self, rank: int, world: int, limit: timedelta) -> Store: ...

    def remove(self) -> None:
        """Remove what lies there, on the host of rank 0, once no rank uses it."""


@dataclass(frozen=True, slots=True)
class MeetingFile:
    """Meeting of one host: a file in a directory of this user alone."""

    directory: str

    @classmethod
    def make(cls, root: str | None = None) -> "MeetingFile":
        """Make a directory in `root`, named so that the next engine removes what a death leaves there."""
        return cls(tempfile.mkdtemp(prefix=".ranks-", dir=root))

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def open(self, rank: int, world: int, limit: timedelta) -> Store:
        store = FileStore(str(Path(self.directory) / "store"), world)
        store.set_timeout(limit)
        return store


@dataclass(frozen=True, slots=True)
class MeetingPort:
    """Meeting of several hosts: a port of rank 0."""

    host: str
    port: int

    def open(self, rank: int, world: int, limit: timedelta) -> Store:
        if rank > 0:
            return TCPStore(self.host, self.port, world, False, limit, wait_for_workers=False)
        listener = socket.create_server((self.host, self.port))
        return TCPStore(
            self.host,
            self.port,
            world,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def remove(self) -> None:
        """Do nothing: the port goes with rank 0."""


def meeting_place(root: str, hosts: int = 1, address: str = "127.0.0.1") -> MeetingPlace:
    """Choose the meeting place of ranks on that many hosts. Rank 0 only, whose IP address is `address`.

    `root`: directory for files of one host.
    """
    if hosts == 1:
        return MeetingFile.make(root)
    with socket.create_server((address, 0)) as free:
        return MeetingPort(address, free.getsockname()[1])


def join(
    place: MeetingPlace, rank: int, world: int, device: str, timeout_s: float, interface: str = "lo"
) -> Ranks:
    """Form the group over a network interface; every rank must call it.

    A peer that hangs fails a collective after `timeout_s`.
    """
    limit = timedelta(seconds=timeout_s)
    os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = interface
    on_gpus = device == "cuda"
    if on_gpus:
        torch.cuda.set_device(0)  # Ray shows each actor its own GPU only
    with nullcontext() if on_gpus else closing_new_listeners():  # NCCL connects later, to its own
        store = place.open(rank, world, limit)
        backend = "nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        mesh = init_device_mesh(device, (world,))
        with closing_new_listeners():
            transfers = dist.new_group(backend="gloo", timeout=limit) if world > 1 else None
    return Ranks(rank, world, mesh, transfers)
