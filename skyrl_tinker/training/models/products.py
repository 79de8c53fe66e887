"""Matrix products: in parts that do not depend on each other, or with more digits than their inputs."""

from collections.abc import Sequence

import torch

from skyrl_tinker.training.models.planned_device import device_type

COLUMNS = 1 << 14
"""Columns of a bfloat16 matrix that a CPU has in float32 at one time."""


def wide_product(left: torch.Tensor, right: torch.Tensor, cuts: Sequence[int] = ()) -> torch.Tensor:
    """Compute left @ right in float32, each cut of the rows separately.

    Rounded to bfloat16, a logit of 30 would be off by up to 0.06.
    """
    out = torch.empty(len(left), right.shape[1], dtype=torch.float32, device=left.device)
    if left.dtype == torch.float32:
        multiply(left, right, out, cuts)
    elif device_type(left) == "cuda":
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:  # a CPU multiplies only into its inputs' type
        for start in range(0, right.shape[1], COLUMNS):
            part = slice(start, start + COLUMNS)
            multiply(left.float(), right[:, part].float(), out[:, part], cuts)
    return out


def add_wide_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `out`, all in float32."""
    if left.dtype == torch.float32:
        torch.addmm(out, left, right, out=out)
    elif device_type(left) == "cuda":
        torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    else:
        out.add_(wide_product(left, right))


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, cuts: Sequence[int]) -> None:
    """Compute out = left @ right, each cut of the rows separately."""
    if len(cuts) < 2:
        torch.mm(left, right, out=out)
        return
    for rows, result in zip(left.split_with_sizes(cuts), out.split_with_sizes(cuts), strict=True):
        torch.mm(rows, right, out=result)
