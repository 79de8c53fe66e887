"""The base's linear layers with adapters: one autograd node each, however many requests share the row.

What a request adds to a gradient is one addend, whatever else of its model is in the row: so the sums do not
depend, to the last bit, on how requests were grouped into rows and passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from skyrl_tinker.training.lora import LoraModel, Pair, Target
from skyrl_tinker.training.rows import Span

Adapters = tuple[tuple[Span, LoraModel], ...]


@dataclass(slots=True)
class Routing:
    """Whose adapter applies to which tokens of the row that is in the network now."""

    active: Adapters = field(default=())

    @contextmanager
    def of(self, adapters: Adapters) -> Iterator[None]:
        before, self.active = self.active, adapters
        try:
            yield
        finally:
            self.active = before


def install(causal_lm: nn.Module, targets: Sequence[Target], routing: Routing) -> None:
    """Every target but the head, whose logits are made chunk by chunk elsewhere."""
    for target in targets:
        module = causal_lm.get_submodule(target.name)
        assert isinstance(module, nn.Linear)
        if not target.is_head:
            module.forward = partial(_forward, module, target.name, routing)  # type: ignore[method-assign]


def apart(leaf: torch.Tensor) -> torch.Tensor:
    """The leaf for one use, whose gradient is added to .grad by itself: autograd would take the sum over all
    uses in the row first."""
    found: torch.Tensor = _Apart.apply(leaf)  # type: ignore[no-untyped-call]
    return found


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> None:
        ctx.leaf.grad += upstream[0]


class _Part(NamedTuple):
    tokens: slice
    pair: Pair
    scale: float


def _forward(module: nn.Linear, name: str, routing: Routing, x: torch.Tensor) -> torch.Tensor:
    parts = [
        _Part(span.part, pair, model.scale)
        for span, model in routing.active
        if (pair := model.pairs.get(name)) is not None
    ]
    if not parts:
        return linear(x, module.weight, module.bias)
    y: torch.Tensor = _Adapted.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, parts[0].pair.a, parts
    )
    return y


class _Adapted(torch.autograd.Function):
    """y = x W^T + scale * (x A^T) B^T on each request's tokens; x [1, T, in], y [1, T, out], W frozen.

    Backward adds to the .grad of A and B in place. `anchor` is a leaf: autograd would otherwise not call it
    where x needs no gradient (the first layer).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        anchor: torch.Tensor,
        parts: list[_Part],
    ) -> torch.Tensor:
        y = linear(x, weight, bias)
        inners = [x[0, tokens] @ pair.a.to(x.dtype).T for tokens, pair, _ in parts]
        for (tokens, pair, scale), inner in zip(parts, inners, strict=True):
            y[0, tokens].addmm_(inner, pair.b.to(x.dtype).T, alpha=scale)
        ctx.parts = parts
        ctx.save_for_backward(x, weight, *inners)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *inners = ctx.saved_tensors
        dx = upstream[0] @ weight if ctx.needs_input_grad[0] else None
        for (tokens, pair, scale), inner in zip(ctx.parts, inners, strict=True):
            dy = upstream[0][0, tokens]
            outer = dy @ pair.b.to(dy.dtype)  # [t, r]
            _accumulate(pair.b, dy, inner, scale)
            _accumulate(pair.a, outer, x[0, tokens], scale)
            if dx is not None:
                dx[0, tokens].addmm_(outer, pair.a.to(dy.dtype), alpha=scale)
        return dx, None, None, None, None


def _accumulate(leaf: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """leaf.grad += scale * left^T right."""
    assert leaf.grad is not None
    if left.dtype == leaf.grad.dtype:
        leaf.grad.addmm_(left.T, right, alpha=scale)
    else:
        leaf.grad.add_(left.T @ right, alpha=scale)
