"""Adapters of all tenants of a row as one, in as many operations as a single tenant takes: for GPUs.

The factors of all models lie side by side, as those of one adapter of the sum of their ranks, and a mask
leaves each token the columns of its own model (the zeros of the others add nothing). A CPU runs each request
separately instead, so that its sums equal, to the last bit, those without the others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from skyrl_tinker.training.models.lora import Factors, LoraModel
from skyrl_tinker.training.models.products import wide_product


class Members(NamedTuple):
    """Models that adapt a layer: a leaf of one, the factors of all, and the columns of each token."""

    anchor: torch.Tensor
    factors: tuple[Factors, ...]
    scales: torch.Tensor | None  # [sum of r] float32; None: all 1
    mask: torch.Tensor  # [T, sum of r]: 1 or 0

    def add_gradients(self, of_a: torch.Tensor, of_b: torch.Tensor) -> None:
        """Add of_a [.., sum of r, in], and the scales times of_b [.., out, sum of r], to the factors' own."""
        ranks = [factors.a.shape[-2] for factors in self.factors]
        if self.scales is not None:
            of_b = of_b * self.scales
        torch._foreach_add_([factors.grad_a for factors in self.factors], of_a.split_with_sizes(ranks, -2))
        torch._foreach_add_([factors.grad_b for factors in self.factors], of_b.split_with_sizes(ranks, -1))


_Columns = tuple[tuple[int, int], ...]
"""Number of each model in the row, and its rank."""


class MergedAdapters:
    """Adapters of one row of T tokens."""

    def __init__(self, models: Sequence[LoraModel], sizes: Sequence[int], device: torch.device) -> None:
        """`models` of the requests; `sizes`: tokens of each and, if any, of the rest of the row."""
        self._models = tuple(dict.fromkeys(models))
        self._device = device
        index = {model: number for number, model in enumerate(self._models)}
        numbers = [index[model] for model in models]
        owners = _to_device([*numbers, *[-1] * (len(sizes) - len(numbers))], device)
        self._owners = owners.repeat_interleave(_to_device(sizes, device), output_size=sum(sizes))  # [T]
        self._columns: dict[_Columns, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def forward(self, module: nn.Linear, name: str, x: torch.Tensor) -> torch.Tensor:
        members = self.of(name, x.dtype)
        if members is None:
            return linear(x, module.weight, module.bias)
        y: torch.Tensor = _Merged.apply(  # type: ignore[no-untyped-call]
            x, module.weight, module.bias, members.anchor, members
        )
        return y

    def of(self, name: str, dtype: torch.dtype) -> "Members | None":
        """Return the models that adapt a layer, None if there are none."""
        numbers = [number for number, model in enumerate(self._models) if name in model.factors]
        if not numbers:
            return None
        factors = tuple(self._models[number].factors[name] for number in numbers)
        ranks = [each.a.shape[-2] for each in factors]
        scales, mask = self._scales_and_mask(tuple(zip(numbers, ranks, strict=True)), dtype)
        return Members(self._models[numbers[0]].pairs[name].a, factors, scales, mask)

    def _scales_and_mask(
        self, columns: _Columns, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if columns not in self._columns:
            numbers = [number for number, rank in columns for _ in range(rank)]
            scales = [self._models[number].scale for number in numbers]
            own = self._owners[:, None] == _to_device(numbers, self._device)
            scaled = any(scale != 1 for scale in scales)
            self._columns[columns] = (_to_device(scales, self._device) if scaled else None, own.to(dtype))
        return self._columns[columns]


def _to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    tensor = torch.tensor(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # so that the copy does not wait for queued work
    return tensor.to(device, non_blocking=True)


class _Merged(torch.autograd.Function):
    """Layer y = x W^T + (mask * (x A^T)) (S B)^T; x [1, T, in], A [R, in], B [out, R], mask [T, R], W frozen.

    S are the scales of the models, by column, in float32: in bfloat16 that of rank 12 would be 0.2 % off.

    Backward adds to the gradients of each model's factors in place. `anchor` is a leaf: autograd would
    otherwise not call it where x needs no gradient (the first layer).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        anchor: torch.Tensor,
        members: Members,
    ) -> torch.Tensor:
        y = linear(x, weight, bias)
        a, b = side_by_side(members, x.dtype)
        inner = (x[0] @ a.T).mul_(members.mask)
        y[0].addmm_(inner, b.T)
        ctx.members = members
        ctx.save_for_backward(x, weight, inner, members.mask)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inner, mask = ctx.saved_tensors
        dy = upstream[0][0]
        a, b = side_by_side(ctx.members, x.dtype)
        outer = (dy @ b).mul_(mask)
        ctx.members.add_gradients(wide_product(outer.T, x[0]), wide_product(dy.T, inner))
        dx = (dy @ weight).addmm_(outer, a)[None] if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None


def side_by_side(members: Members, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate A [.., r, in] and scaled B [.., out, r] of all models along r."""
    first, *others = members.factors
    a, b = first.a, first.b
    if others:  # or torch would copy them
        a = torch.cat([each.a for each in members.factors], -2)
        b = torch.cat([each.b for each in members.factors], -1)
    if members.scales is not None:
        b = b * members.scales
    return a.to(dtype), b.to(dtype)
