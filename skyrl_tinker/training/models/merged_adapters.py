"""Adapters of all tenants of a row as one, in as many operations as a single tenant takes: for GPUs.

The factors of all models lie side by side, as those of one adapter of the sum of their ranks, and a mask
leaves each token the columns of its own model (the zeros of the others add nothing). A CPU runs each request
by itself instead, whose sums then are, to the last bit, the same as without the others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from skyrl_tinker.training.models.lora import Factors, LoraModel
from skyrl_tinker.training.models.products import wide_product


class Members(NamedTuple):
    """Models that adapt a layer: a leaf of one, the factors of all, and which columns are each token's."""

    anchor: torch.Tensor
    factors: tuple[Factors, ...]
    mask: torch.Tensor  # [T, sum of r]


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
        self._masks: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}

    def forward(self, module: nn.Linear, name: str, x: torch.Tensor) -> torch.Tensor:
        members = self.of(name, x.dtype)
        if members is None:
            return linear(x, module.weight, module.bias)
        y: torch.Tensor = _Merged.apply(  # type: ignore[no-untyped-call]
            x, module.weight, module.bias, members.anchor, members.factors, members.mask
        )
        return y

    def of(self, name: str, dtype: torch.dtype) -> "Members | None":
        """Return the models that adapt a layer, None if no one does."""
        numbers = [number for number, model in enumerate(self._models) if name in model.factors]
        if not numbers:
            return None
        factors = tuple(self._models[number].factors[name] for number in numbers)
        ranks = [each.a.shape[-2] for each in factors]
        mask = self._mask(tuple(zip(numbers, ranks, strict=True)), dtype)
        return Members(self._models[numbers[0]].pairs[name].a, factors, mask)

    def _mask(self, ranks: tuple[tuple[int, int], ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the scale of its model for each token and column of these models, else 0: [T, sum of r].

        `ranks`: number of each model and its rank.
        """
        if ranks not in self._masks:
            columns = [number for number, rank in ranks for _ in range(rank)]
            scales = [self._models[number].scale for number in columns]
            own = self._owners[:, None] == _to_device(columns, self._device)
            self._masks[ranks] = own * _to_device(scales, self._device).to(dtype)
        return self._masks[ranks]


def _to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    tensor = torch.tensor(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # the copy then does not wait for what is queued
    return tensor.to(device, non_blocking=True)


class _Merged(torch.autograd.Function):
    """Layer y = x W^T + (mask * (x A^T)) B^T; x [1, T, in], A [R, in], B [out, R], mask [T, R], W frozen.

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
        factors: tuple[Factors, ...],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        y = linear(x, weight, bias)
        a, b = side_by_side(factors, x.dtype)
        inner = (x[0] @ a.T).mul_(mask)
        y[0].addmm_(inner, b.T)
        ctx.factors = factors
        ctx.save_for_backward(x, weight, inner, mask)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inner, mask = ctx.saved_tensors
        dy = upstream[0][0]
        a, b = side_by_side(ctx.factors, x.dtype)
        outer = (dy @ b).mul_(mask)
        ranks = [len(factors.a) for factors in ctx.factors]
        of_a, of_b = wide_product(outer.T, x[0]), wide_product(dy.T, inner)
        torch._foreach_add_([factors.grad_a for factors in ctx.factors], of_a.split_with_sizes(ranks))
        torch._foreach_add_([factors.grad_b for factors in ctx.factors], of_b.split_with_sizes(ranks, 1))
        dx = torch.addmm(dy @ weight, outer, a)[None] if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


def side_by_side(factors: Sequence[Factors], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate A [.., r, in] and B [.., out, r] of all models along r."""
    if len(factors) == 1:  # or torch would copy them
        return factors[0].a.to(dtype), factors[0].b.to(dtype)
    a = torch.cat([each.a for each in factors], -2).to(dtype)
    b = torch.cat([each.b for each in factors], -1).to(dtype)
    return a, b
