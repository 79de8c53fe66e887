"""Collectives of a row under FSDP, counted, so that a rank which gave a row up can make the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter


class RowCollectives:
    """Count of the collectives of a network's current row, the same on all ranks when the row has ended."""

    def __init__(self) -> None:
        self._made = 0
        self._skipped = 0

    def install(self, module: nn.Module) -> None:
        """Count those of an FSDP module from now on."""
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(_AllGather(self))
        module.set_custom_reduce_scatter(_ReduceScatter(self))

    def begin(self) -> None:
        """Begin a row."""
        self._made = self._skipped = 0

    def begin_again(self) -> None:
        """Begin the row once more, without the collectives that have been made: peers have left them."""
        self._made, self._skipped = 0, self._made

    def next_is_due(self) -> bool:
        """Count one; returns False if peers have made it already."""
        if self._skipped:
            self._skipped -= 1
            return False
        self._made += 1
        return True


class _AllGather(DefaultAllGather):
    def __init__(self, row: RowCollectives) -> None:
        self._row = row

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self._row.next_is_due():
            return None
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, row: RowCollectives) -> None:
        self._row = row

    def __call__(  # type: ignore[override] # None, as its own base class has it
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: "dist.ReduceOp | dist.ReduceOp.RedOpType",
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self._row.next_is_due():
            return None
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
