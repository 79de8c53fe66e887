"""Log-probabilities of target tokens without the [T, V] matrix of all of them."""

from typing import Any, NamedTuple

import torch

CHUNK = 256
"""Tokens whose logits exist at one time."""

KEPT = 1 << 22
"""Up to so many logits of a row (16 MiB) wait for backward; more are computed again."""


class Head(NamedTuple):
    """logits = hidden @ weight.T + inner @ outer.T; the second term is there for an adapted head only."""

    weight: torch.Tensor  # [V, D]
    inner: torch.Tensor | None = None  # [T, r], scale * hidden @ A.T
    outer: torch.Tensor | None = None  # [V, r], B


def token_logprobs(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """hidden [T, D], targets [T] int64 -> [T] float32, differentiable in hidden, weight, inner and outer."""
    result: torch.Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.inner, head.outer, targets
    )
    return result


class _TokenLogprobs(torch.autograd.Function):
    """Keeps log-sum-exp, and logits where they are few; chunks without upstream gradient are skipped."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        inner: torch.Tensor | None,
        outer: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        result = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(result)
        keep = any(ctx.needs_input_grad) and len(targets) * len(weight) <= KEPT
        ctx.kept = {}
        for part in _chunks(len(targets)):
            logits = _logits(hidden[part], weight, _cut(inner, part), outer)
            lse[part] = logits.logsumexp(-1)
            result[part] = logits.gather(-1, targets[part, None])[:, 0] - lse[part]
            if keep:
                ctx.kept[part.start] = logits
        ctx.save_for_backward(hidden, weight, inner, outer, targets, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, inner, outer, targets, lse = ctx.saved_tensors
        grads = [
            torch.zeros_like(tensor, dtype=dtype) if wanted else None
            for tensor, wanted, dtype in zip(
                (hidden, weight, inner, outer),
                ctx.needs_input_grad,
                (None, torch.float32, None, torch.float32),
                strict=False,
            )
        ]
        for part in _chunks(len(targets)):
            if upstream[0][part].any():
                logits = ctx.kept.pop(part.start, None)  # once: _delta overwrites it
                if logits is None:
                    logits = _logits(hidden[part], weight, _cut(inner, part), outer)
                delta = _delta(logits, lse[part], targets[part], upstream[0][part]).to(hidden.dtype)
                _accumulate(grads, part, delta, (hidden, weight, inner, outer))
        _match(grads, (hidden, weight, inner, outer))
        return (*grads, None)


def _chunks(length: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]


def _cut(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor | None, outer: torch.Tensor | None
) -> torch.Tensor:
    """[n, V] float32."""
    logits = (hidden @ weight.T).float()
    return logits if inner is None or outer is None else logits.add_(inner @ outer.T)


def _delta(
    logits: torch.Tensor, lse: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """d loss / d logits = (onehot - softmax) * upstream; overwrites logits."""
    delta = logits.sub_(lse[:, None]).exp_().mul_(-upstream[:, None])
    return delta.scatter_add_(-1, targets[:, None], upstream[:, None])


def _accumulate(
    grads: list[torch.Tensor | None],
    part: slice,
    delta: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
) -> None:
    hidden, weight, inner, outer = inputs
    of_hidden, of_weight, of_inner, of_outer = grads
    if of_hidden is not None:
        torch.mm(delta, weight, out=of_hidden[part])
    if of_weight is not None:
        of_weight += delta.T @ hidden[part]
    if of_inner is not None and outer is not None:
        torch.mm(delta, outer, out=of_inner[part])
    if of_outer is not None and inner is not None:
        of_outer += delta.T @ inner[part]


def _match(grads: list[torch.Tensor | None], inputs: tuple[torch.Tensor | None, ...]) -> None:
    """Gradients were summed in float32; hand them back in their input's type."""
    for index, (grad, tensor) in enumerate(zip(grads, inputs, strict=True)):
        if grad is not None and tensor is not None:
            grads[index] = grad.to(tensor.dtype)
