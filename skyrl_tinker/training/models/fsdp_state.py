"""State that FSDP2 keeps between the hooks of one iteration."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reset(root: nn.Module) -> None:
    """Clear the state of an iteration that was aborted, and all gradients that it left on whole weights.

    `root`: the outermost FSDP module, which has run.
    """
    assert isinstance(root, FSDPModule)
    if hasattr(root, "reset_iter_state"):  # from torch 2.13 on
        root.reset_iter_state()
    else:
        _reset_iter_state(root)
    for group in _groups(root):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):  # torch leaves what this layer's backward got so far
                parameter._unsharded_param.grad = None


def _reset_iter_state(root: FSDPModule) -> None:
    """Do what torch 2.13 does, for one rank, which has no collectives to wait for.

    Hooks would take the next forward for the second one of a checkpoint, and finish no backward.
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
