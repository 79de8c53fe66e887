"""Rows of data-parallel ranks, gathered for the experts that they share: stock vLLM does it on GPUs only."""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

Tensors = torch.Tensor | list[torch.Tensor]


def apply() -> None:
    """Add collectives for unequal numbers of rows per rank to vLLM's communicator for CPUs."""
    communicator: type = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv  # type: ignore[attr-defined]


def _all_gatherv(
    self: CpuCommunicator, given: Tensors, dim: int = 0, sizes: list[int] | None = None
) -> Tensors:
    """Return the rows of all ranks, in their order. `sizes`: rows by rank; None: as many as this rank's."""
    if isinstance(given, list):
        return [_all_gatherv(self, each, dim, sizes) for each in given]  # type: ignore[misc]
    sizes = sizes or [len(given)] * self.world_size
    whole = given.new_zeros((sum(sizes), *given.shape[1:]))
    parts = whole.split(sizes)  # type: ignore[no-untyped-call]
    parts[self.rank_in_group].copy_(given)
    for part, rank in zip(parts, self.ranks, strict=True):
        dist.broadcast(part, rank, group=self.device_group)
    return whole


def _reduce_scatterv(
    self: CpuCommunicator, given: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    summed = given.clone()
    dist.all_reduce(summed, group=self.device_group)
    sizes = sizes or [len(given) // self.world_size] * self.world_size
    own: torch.Tensor = summed.split(sizes)[self.rank_in_group]  # type: ignore[no-untyped-call]
    return own
