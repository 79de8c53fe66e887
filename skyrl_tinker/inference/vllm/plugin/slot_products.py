"""Products of rows with the adapters in their slots, on a CPU.

Stock vLLM copies a matrix for every row, at 20 times the cost of the product. It also takes slot -1, of
base-model rows, for the *last* adapter when they share a batch with adapters.
"""

import torch

Rows = torch.Tensor | slice


def apply() -> None:
    """Replace vLLM's LoRA ops."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for op in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
        for module in (lora_ops, punica_cpu):  # the sgmv_* ops look them up in the first
            setattr(module, op.__name__, op)


def bgmv_shrink(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Set output[row] = scaling * A[slot of row] @ inputs[row]; zero where the slot is negative."""
    for slot, rows in rows_by_slot(slots):
        if slot < 0:
            output[rows] = 0
        else:
            matrix = _matrix(weights, slot, output.dtype)
            output[rows, : len(matrix)] = scaling * (inputs[rows].to(output.dtype) @ matrix.T)


def bgmv_expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Call bgmv_expand_slice on the columns that both sides have: they may be padded differently."""
    width = min(weights.shape[-2], output.shape[1])
    bgmv_expand_slice(inputs, weights[..., :width, :], output, slots, 0, width, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Add to output[row, slice] += B[slot of row] @ inputs[row]; base rows (slot < 0) get nothing added."""
    columns = output[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        columns.zero_()
    for slot, rows in rows_by_slot(slots):
        if slot >= 0:
            columns[rows] += inputs[rows].to(output.dtype) @ _matrix(weights, slot, output.dtype).T


def rows_by_slot(slots: torch.Tensor) -> list[tuple[int, Rows]]:
    """List the rows of each slot; a single slot stands for all rows."""
    first = int(slots[0])
    if bool((slots == first).all()):
        return [(first, slice(None))]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in torch.unique(slots).tolist()]


def _matrix(weights: torch.Tensor, slot: int, dtype: torch.dtype) -> torch.Tensor:
    """Slice [slots, 1, out, in] or [slots, out, in] to [out, in]."""
    return weights[slot].reshape(-1, weights.shape[-1]).to(dtype)
