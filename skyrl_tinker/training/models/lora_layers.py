"""Linear layers of the base with adapters: one autograd node each, however many requests share the row.

On a CPU each request adds one term to a gradient, even next to other requests of its model, so that the sums
do not depend, to the last bit, on how requests were grouped into rows and passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from skyrl_tinker.training.batching.packed_row import Replayed, Row, Span
from skyrl_tinker.training.models.lora import AdaptedLayer, Factors, LoraModel
from skyrl_tinker.training.models.merged_adapters import MergedAdapters
from skyrl_tinker.training.models.planned_device import device_type

Adapters = tuple[tuple[Span, LoraModel], ...]


class Active(NamedTuple):
    """Adapters of a row, the number of tokens to which each applies, and how its layers run."""

    models: tuple[LoraModel, ...]  # of each request
    sizes: list[int]  # tokens of each request and, if any, the rest of the row
    recompute: int = 0  # layers that run again in backward, the first ones
    merged: MergedAdapters | None = None  # on a GPU
    runs: tuple[tuple[int, int], ...] = ()  # (count, length): consecutive sequences of equal length
    replayed: Replayed | None = None

    @classmethod
    def from_adapters(cls, adapters: Adapters, embedded: torch.Tensor, recompute: int, row: Row) -> "Active":
        """Lay adapters over a row, `embedded` [1, T, D]; the spans tile it but for its end."""
        sizes = [len(span) for span, _ in adapters]
        if rest := embedded.shape[1] - sum(sizes):
            sizes.append(rest)
        models = tuple(model for _, model in adapters)
        on_gpu = models and device_type(embedded) == "cuda"
        merged = MergedAdapters(models, sizes, embedded.device) if on_gpu else None
        return cls(models, sizes, recompute, merged, row.segments.runs, row.replayed)


@dataclass(slots=True)
class Routing:
    """Adapters of the row that is in the network now."""

    active: Active = field(default_factory=lambda: Active((), []))

    @contextmanager
    def using(self, active: Active) -> Iterator[None]:
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before


def install(causal_lm: nn.Module, targets: Sequence[AdaptedLayer], routing: Routing) -> None:
    """Adapt every linear layer but the head, whose logits are computed chunk by chunk elsewhere."""
    for target in targets:
        if not target.is_head and not target.experts:
            module = causal_lm.get_submodule(target.name)
            assert isinstance(module, nn.Linear)
            module.forward = partial(_forward, module, target.name, routing)  # type: ignore[method-assign]


def accumulate_alone(leaf: torch.Tensor) -> torch.Tensor:
    """Return the leaf for one use, whose gradient is added to .grad separately.

    Autograd would take the sum over all uses in the row first.
    """
    view: torch.Tensor = _AccumulateAlone.apply(leaf)  # type: ignore[no-untyped-call]
    return view


class _AccumulateAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> None:
        ctx.leaf.grad += upstream[0]


_Part = tuple[int, Factors, float]
"""One request's share in a layer: (index of the request in the row, factors, scale)."""


def _forward(module: nn.Linear, name: str, routing: Routing, x: torch.Tensor) -> torch.Tensor:
    models, sizes, merged = routing.active.models, routing.active.sizes, routing.active.merged
    if merged is not None:
        return merged.forward(module, name, x)
    parts = [
        (index, model.factors[name], model.scale)
        for index, model in enumerate(models)
        if name in model.factors
    ]
    if not parts:
        return linear(x, module.weight, module.bias)
    anchor = models[parts[0][0]].pairs[name].a
    y: torch.Tensor = _Adapted.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, anchor, parts, sizes
    )
    return y


class _Adapted(torch.autograd.Function):
    """Layer y = x W^T + scale * (x A^T) B^T on each request's tokens; x [1, T, in], y [1, T, out], W frozen.

    Backward adds to the gradients of A and B in place. `anchor` is a leaf: autograd would otherwise not call
    it where x needs no gradient (the first layer). Small tenants cost calls rather than arithmetic: each
    tensor is split for all of them in one call, by `sizes`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        anchor: torch.Tensor,
        parts: list[_Part],
        sizes: list[int],
    ) -> torch.Tensor:
        y = linear(x, weight, bias)
        xs, ys = x.squeeze(0).split_with_sizes(sizes), y.squeeze(0).split_with_sizes(sizes)
        inners = []
        for index, factors, scale in parts:
            cast = factors if factors.a.dtype == x.dtype else factors.to(x.dtype)
            inner = xs[index].mm(cast.a_t)
            ys[index].addmm_(inner, cast.b_t, alpha=scale)
            inners.append(inner)
        ctx.parts, ctx.sizes = parts, sizes
        ctx.save_for_backward(x, weight, *inners)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *inners = ctx.saved_tensors
        dx = upstream[0] @ weight if ctx.needs_input_grad[0] else None
        dxs = () if dx is None else dx.squeeze(0).split_with_sizes(ctx.sizes)
        dy = upstream[0].squeeze(0)
        dys, dys_t = dy.split_with_sizes(ctx.sizes), dy.T.split_with_sizes(ctx.sizes, 1)
        xs = x.squeeze(0).split_with_sizes(ctx.sizes)
        for (index, factors, scale), inner in zip(ctx.parts, inners, strict=True):
            cast = factors if factors.a.dtype == dy.dtype else factors.to(dy.dtype)
            outer = dys[index].mm(cast.b)  # [t, r]
            _accumulate(cast.grad_b, dys_t[index], inner, scale)
            _accumulate(cast.grad_a, outer.T, xs[index], scale)
            if dxs:
                dxs[index].addmm_(outer, cast.a, alpha=scale)
        return dx, None, None, None, None, None


def _accumulate(gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """Add scale * left right to the gradient."""
    if left.dtype == gradient.dtype:
        gradient.addmm_(left, right, alpha=scale)
    else:
        gradient.add_(left @ right, alpha=scale)
