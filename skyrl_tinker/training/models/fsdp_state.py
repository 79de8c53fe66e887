"""State that FSDP2 keeps during one iteration, and the iteration's collectives.

Collectives are counted, so that a rank which aborted an iteration can join its peers in the remaining ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter


def reset(root: nn.Module) -> None:
    """Clear the state of an iteration that was aborted, and all gradients that it left on whole weights.

    `root`: the outermost FSDP module, which has run.
    """
    assert isinstance(root, FSDPModule)
    _finish_collectives(root)
    if hasattr(root, "reset_iter_state"):  # from torch 2.13 on
        root.reset_iter_state()
    else:
        _reset_iter_state(root)
    for group in _groups(root):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):  # torch leaves the gradient of an aborted backward
                parameter._unsharded_param.grad = None


def _finish_collectives(root: FSDPModule) -> None:
    """Wait on the host until no collective reads or writes memory that is about to be freed.

    Before it returns expandable segments, CUDA's allocator waits only for the streams that allocated in them.
    """
    state = root._get_fsdp_state()
    if state._device.type == "cuda":
        state._comm_ctx.all_gather_stream.synchronize()
        state._comm_ctx.reduce_scatter_stream.synchronize()


@contextmanager
def dropped_gradients(root: nn.Module) -> Iterator[None]:
    """Drop the sharded gradients, and each further one as soon as it is reduced: for a pass that is void."""
    trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
    for parameter in trained:
        _drop(parameter)
    hooks: list[Any] = [
        parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
        for parameter in trained
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _reset_iter_state(root: FSDPModule) -> None:
    """Reset the state as torch 2.13 does. After `_finish_collectives` there are no events to wait for.

    Otherwise hooks would take the next forward for a checkpoint's second one, and not finish a backward.
    """
    state = root._get_fsdp_state()
    idle = type(state._training_state).IDLE
    for each in state._state_ctx.all_states:
        each._training_state = idle
    for group in _groups(root):
        group._training_state = idle
        group._all_gather_result = None
        group._post_forward_indices.clear()
        group._to_sharded()
    state._comm_ctx.post_forward_order.clear()
    state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _groups(root: FSDPModule) -> Iterator[Any]:
    """Yield the groups of parameters that are gathered together: one of each FSDP module."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        if state._fsdp_param_group is not None:
            yield state._fsdp_param_group


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
        """Begin the row again, skipping the collectives already made, which the peers do not repeat."""
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
