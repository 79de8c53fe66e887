"""Experts of a mixture with adapters: tokens sorted by expert, results weighted and summed up per token.

On a GPU all tokens of a row go through one grouped product per tensor, whatever the number of tenants. A CPU
multiplies the tokens of one sequence and one expert at a time, and adds to gradients sequence by sequence, so
that a sequence's results equal, to the last bit, those it would have alone.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import grouped_mm

from skyrl_tinker.domain.values import Int64
from skyrl_tinker.training.models.fused.gated_products import gated
from skyrl_tinker.training.models.lora import Factors
from skyrl_tinker.training.models.lora_layers import Active, Routing
from skyrl_tinker.training.models.merged_adapters import Members, side_by_side
from skyrl_tinker.training.models.mixtures import ExpertLayout, find_mixtures, layout_of
from skyrl_tinker.training.models.planned_device import device_type


def install(causal_lm: nn.Module, routing: Routing) -> None:
    """Adapt the experts of every mixture, and have its router replay choices; all layers have experts."""
    for layer, (name, module) in enumerate(find_mixtures(causal_lm).items()):
        module.forward = partial(_forward, module, name, routing)
        if gate := layout_of(module).gate:
            router: Any = causal_lm.get_submodule(f"{name.rpartition('.')[0]}.{gate}")
            router.forward = partial(_route, router, router.forward, routing, layer)


def _route(
    router: Any, forward: Callable[..., Any], routing: Routing, layer: int, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return scores [T, E] and, of the experts chosen or replayed for each token, weights and numbers [T, K].

    Router replay (R3, arXiv:2510.11370): weights are this router's own, so that it can learn.
    """
    logits, weights, chosen = forward(x)
    replayed = routing.active.replayed
    if replayed is None:
        return logits, weights, chosen
    chosen = torch.where(replayed.known, replayed.experts[:, layer].to(chosen.dtype), chosen)
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen


def _forward(
    module: Any, name: str, routing: Routing, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts' part; x [T, D], the experts of each token and their weights [T, K] -> [T, D]."""
    active, layout = routing.active, layout_of(module)
    experts = len(module.down_proj)
    way = _AtOnce if device_type(x) == "cuda" else _Apart
    work: _AtOnce | _Apart = way(active, chosen, experts)
    numbers = chosen.flatten()[work.order]

    def product(matrix: str, inputs: torch.Tensor) -> torch.Tensor:
        outputs, bias = work.product(module, name, matrix, inputs), layout.bias(module, matrix)
        return outputs if bias is None else outputs + bias.index_select(0, numbers)

    copies = x[:, None].expand(*chosen.shape, -1).flatten(0, 1)  # their gradients are summed up in order
    gate_up = product("gate_up_proj", copies.index_select(0, work.order))
    y = product("down_proj", _gate(module, layout, gate_up))
    places = torch.empty_like(work.order)
    places[work.order] = torch.arange(len(places), device=places.device)
    return (y.index_select(0, places).view(*chosen.shape, -1) * weights[..., None]).sum(1)


def _gate(module: Any, layout: ExpertLayout, gate_up: torch.Tensor) -> torch.Tensor:
    if layout.whole:
        gated_up: torch.Tensor = module._apply_gate(gate_up)
        return gated_up
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(module.act_fn, gate, up)


class _AtOnce:
    """All tokens of a row, each once for every expert that it has chosen: N = T K, sorted by expert."""

    def __init__(self, active: Active, chosen: torch.Tensor, experts: int) -> None:
        flat = chosen.flatten()
        self.order = flat.argsort(stable=True)  # [N]
        counts = torch.zeros(experts, dtype=torch.int32, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        self._ends = counts.cumsum(0, dtype=torch.int32)
        self._chosen = counts > 0
        self._tokens = self.order // chosen.shape[1]
        self._merged = active.merged

    def product(self, module: Any, name: str, matrix: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [N, in] by each token's expert."""
        layout = layout_of(module)
        y = grouped_product(x, layout.weight(module, matrix), self._ends, self._chosen)
        layers = layout.layers[matrix]
        if self._merged is None:
            return y
        parts = [
            self._adapted(self._merged.of(f"{name}.{leaf}", x.dtype), x, part)
            for leaf, part in zip(layers, y.chunk(len(layers), dim=-1), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _adapted(self, members: Members | None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if members is None:
            return y
        mask = members.mask[self._tokens]
        delta: torch.Tensor = _MergedDelta.apply(  # type: ignore[no-untyped-call]
            x, members.anchor, members, mask, self._ends, self._chosen
        )
        return y + delta


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Multiply x [N, in] by each token's expert of weight [E, out, in]; `chosen` bool [E]: it has tokens.

    The other experts' gradients are set to 0: some GPUs leave them uninitialised (pytorch issue 172439).
    """
    transposed = weight.mT
    if transposed.requires_grad:
        mask = chosen[:, None, None]
        transposed.register_hook(lambda gradient: torch.where(mask, gradient, 0))  # type: ignore[no-untyped-call]
    return grouped_mm(x, transposed, offs=ends)


class _MergedDelta(torch.autograd.Function):
    """Deltas (mask * (x A^T)) (S B)^T of each token's expert; x [N, in], A [E, R, in], B [E, out, R].

    The mask [N, R] leaves each token the columns of its own model, S are the models' scales. `chosen` [E]:
    experts that have tokens.

    Backward adds to the gradients of each model's factors in place. `anchor` is a leaf: autograd would
    otherwise not call it where x needs no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        members: Members,
        mask: torch.Tensor,
        ends: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        a, b = _padded(members, x.dtype)
        mask = nn.functional.pad(mask, (0, a.shape[1] - mask.shape[1]))
        inner = grouped_mm(x, a.mT, offs=ends).mul_(mask)
        ctx.members = members
        ctx.save_for_backward(x, inner, mask, ends, chosen)
        return grouped_mm(inner, b.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner, mask, ends, chosen = ctx.saved_tensors
        dy = upstream[0].contiguous()
        a, b = _padded(ctx.members, x.dtype)
        rank = ctx.members.mask.shape[1]
        outer = grouped_mm(dy, b, offs=ends).mul_(mask)
        # As in grouped_product: experts without tokens
        of_a, of_b = (
            torch.where(chosen[:, None, None], grouped_mm(left.mT, right, offs=ends), 0)
            for left, right in ((outer, x), (dy, inner))
        )
        ctx.members.add_gradients(of_a[:, :rank].float(), of_b[..., :rank].float())
        dx = grouped_mm(outer, a, offs=ends) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


def _padded(members: Members, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate all models' factors, with zeros up to a multiple of 8: grouped products want 16 bytes."""
    a, b = side_by_side(members, dtype)
    rest = -a.shape[1] % 8
    return nn.functional.pad(a, (0, 0, 0, rest)), nn.functional.pad(b.contiguous(), (0, rest))


class _Group(NamedTuple):
    """Tokens of one sequence that have chosen the same expert. `request` may be past the end: no adapter."""

    expert: int
    request: int
    size: int


_Adapters = Mapping[int, tuple[Factors, float]]
"""Factors and scale by request."""


class _Apart:
    """Tokens of a row, each once for every expert that it has chosen, sorted by sequence and expert."""

    def __init__(self, active: Active, chosen: torch.Tensor, experts: int) -> None:
        self._models = active.models
        lengths = [length for count, length in active.runs for _ in range(count)]
        sequences, requests = _repeat(lengths), _repeat(active.sizes)
        if isinstance(chosen, FakeTensor):  # no values: an equal share for each expert
            numbers = (np.arange(chosen.numel()) % experts).reshape(chosen.shape)
        else:
            numbers = chosen.numpy()
        keys = (sequences[:, None] * experts + numbers).ravel()
        order = keys.argsort(kind="stable")
        found, firsts, sizes = np.unique(keys[order], return_index=True, return_counts=True)
        owners = requests[order[firsts] // chosen.shape[1]]
        self.order = torch.tensor(order)
        self._groups = [
            _Group(*group)
            for group in zip((found % experts).tolist(), owners.tolist(), sizes.tolist(), strict=True)
        ]

    def product(self, module: Any, name: str, matrix: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [N, in] by each token's expert."""
        layout = layout_of(module)
        leaves = [f"{name}.{leaf}" for leaf in layout.layers[matrix]]
        anchor = next((model.pairs[leaves[0]].a for model in self._models if leaves[0] in model.pairs), None)
        y: torch.Tensor = _ApartProduct.apply(  # type: ignore[no-untyped-call]
            x, layout.weight(module, matrix), anchor, self._groups, [self._adapters(leaf) for leaf in leaves]
        )
        return y

    def _adapters(self, name: str) -> _Adapters:
        return {
            index: (model.factors[name], model.scale)
            for index, model in enumerate(self._models)
            if name in model.factors
        }


def _repeat(sizes: list[int]) -> Int64:
    """Return for each token the number of the part that it is in."""
    return np.repeat(np.arange(len(sizes)), sizes)


class _ApartProduct(torch.autograd.Function):
    """Groups y = x W^T + scale * (x A^T) B^T, W, A and B of the group's expert; x [N, in], W [E, out, in].

    `adapters`: of the parts of W's rows, which are of equal size. Backward adds to the gradients of A and B
    in place, group by group. `anchor` is a leaf, or None without adapters: autograd would otherwise not call
    it where x needs no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        anchor: torch.Tensor | None,
        groups: list[_Group],
        adapters: list[_Adapters],
    ) -> torch.Tensor:
        y = x.new_empty(len(x), weight.shape[1])
        sizes = [group.size for group in groups]
        for group, xs, ys in zip(groups, x.split_with_sizes(sizes), y.split_with_sizes(sizes), strict=True):
            torch.mm(xs, weight[group.expert].T, out=ys)
            for part, (a, b, _, scale) in _adapted(group, adapters, ys):
                part.addmm_(xs @ a.T, b.T, alpha=scale)
        ctx.groups, ctx.adapters = groups, adapters
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = upstream[0]
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        sizes = [group.size for group in ctx.groups]
        for group, xs, dys, dxs in zip(
            ctx.groups,
            x.split_with_sizes(sizes),
            dy.split_with_sizes(sizes),
            dx.split_with_sizes(sizes),
            strict=True,
        ):
            torch.mm(dys, weight[group.expert], out=dxs)
            if dw is not None:
                dw[group.expert] += dys.T @ xs
            for part, (a, b, factors, scale) in _adapted(group, ctx.adapters, dys):
                outer = part @ b
                factors.grad_a[group.expert].add_(outer.T @ xs, alpha=scale)
                factors.grad_b[group.expert].add_(part.T @ (xs @ a.T), alpha=scale)
                dxs.addmm_(outer, a, alpha=scale)
        return dx, None if dw is None else dw.to(weight.dtype), None, None, None


class _Pair(NamedTuple):
    a: torch.Tensor  # [r, in], in the compute type
    b: torch.Tensor  # [out, r]
    factors: Factors  # of all experts
    scale: float


def _adapted(
    group: _Group, adapters: Sequence[_Adapters], rows: torch.Tensor
) -> list[tuple[torch.Tensor, _Pair]]:
    """Return the adapted parts of these rows, [n, out] each, with the pairs of the group's expert."""
    found = []
    for part, by_request in zip(rows.chunk(len(adapters), dim=-1), adapters, strict=True):
        if group.request in by_request:
            factors, scale = by_request[group.request]
            a, b = (each[group.expert].to(rows.dtype) for each in (factors.a, factors.b))
            found.append((part, _Pair(a, b, factors, scale)))
    return found
