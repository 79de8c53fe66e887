"""Process group of the ranks: gloo on CPU, NCCL on CUDA."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyrl_tinker.errors import SkyrlTinkerError

HOST = "127.0.0.1"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of a process among its peers."""

    rank: int
    world: int
    mesh: DeviceMesh

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)

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
        errors = [error]
        if self.world > 1:
            errors *= self.world
            dist.all_gather_object(errors, error)
        for error in errors:
            if error is not None:
                raise error
        return value


def open_store(timeout_s: float) -> TCPStore:
    """Open rank 0's store on a port that the kernel picks: `.port`. It listens until `join`, and after."""
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def connect_store(port: int, timeout_s: float) -> TCPStore:
    return TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(store: Store, rank: int, world: int, device: str, timeout_s: float) -> Ranks:
    """Form the group; every rank must call it. A peer that hangs fails a collective after `timeout_s`."""
    backend = "nccl" if device == "cuda" else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo's default is the address of the host's name
    if device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each actor its own GPU only
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )
    return Ranks(rank, world, init_device_mesh(device, (world,)))
