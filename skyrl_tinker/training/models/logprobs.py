"""Log-probabilities of target tokens without the [T, V] matrix of all tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from skyrl_tinker.training.models.planned_device import device_type
from skyrl_tinker.training.models.products import add_wide_product, multiply, wide_product

CHUNK, GPU_CHUNK = 256, 2048
"""Numbers of tokens whose logits exist at one time. On a GPU more: each chunk reads the whole head, and adds
to a gradient as large in float32.
"""
KEPT = 1 << 22
"""Most logits of one model's tokens in a row (16 MiB) that wait for backward; more are computed again."""
KEPT_OF_ROW = 4 * KEPT
"""Limit for all models of a row together."""


def chunk_tokens(of: torch.Tensor | torch.device) -> int:
    return GPU_CHUNK if device_type(of) == "cuda" else CHUNK


def shared_tokens(vocab: int) -> int:
    """Most tokens of several requests that share one call: one chunk, with logits that may be kept."""
    return min(CHUNK, KEPT // vocab)


class Head(NamedTuple):
    """Head: logits = hidden @ weight.T + inner @ outer.T, the second term for an adapted head only."""

    weight: torch.Tensor  # [V, D]
    inner: torch.Tensor | None = None  # [T, r], scale * hidden @ A.T
    outer: torch.Tensor | None = None  # [V, r], B


def token_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    cell_tokens: torch.Tensor | None = None,
    *,
    keep: bool = True,
    dense: bool = False,
    cuts: Sequence[int] = (),
) -> torch.Tensor:
    """Score targets: hidden [T, D], targets [C] int64 -> [C] float32.

    Differentiable in hidden, weight, inner and outer. `cell_tokens` [C] int64, not falling: the token at
    which each target is scored; None: one each, C = T. `keep`: logits may wait for backward, if they are few.
    `dense`: most targets will have a gradient. `cuts`: number of tokens of each of several requests,
    `shared_tokens` in all, which are multiplied separately: so a request's numbers are, to the last bit, the
    same as without the others.
    """
    few = len(hidden) * len(head.weight) <= KEPT
    frozen = head.outer is None and not head.weight.requires_grad
    if (
        dense
        and frozen
        and not few
        and cell_tokens is None
        and torch.is_grad_enabled()
        and hidden.requires_grad
    ):
        return frozen_logprobs(hidden, head.weight, targets)
    keep = keep and few
    result: torch.Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.inner, head.outer, targets, cell_tokens, keep, cuts
    )
    return result


def frozen_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Score one target of each token, differentiable in hidden only and without logits in backward.

    Forward computes d logprob / d hidden already; this product is wasted where no gradient arrives.
    """
    result: torch.Tensor = _FrozenLogprobs.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return result


class _Part(NamedTuple):
    """One chunk: its tokens, its cells, and the position of the cells in the chunk's logits."""

    tokens: slice
    cells: slice
    rows: torch.Tensor | None  # [c], token of each cell within the chunk; None: one each
    targets: torch.Tensor  # [c]


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs that keep log-sum-exp, and few logits; chunks without upstream gradient are skipped."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        inner: torch.Tensor | None,
        outer: torch.Tensor | None,
        targets: torch.Tensor,
        cell_tokens: torch.Tensor | None,
        keep: bool,
        cuts: Sequence[int],
    ) -> torch.Tensor:
        result = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        lse = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        keep = keep and any(ctx.needs_input_grad)
        ctx.kept = {}
        ctx.cuts = cuts
        for part in _parts(hidden, targets, cell_tokens):
            tokens = part.tokens
            logits = _logits(hidden[tokens], weight, _cut(inner, tokens), outer, cuts)
            lse[tokens] = logits.logsumexp(-1)
            result[part.cells] = _pick(logits, part) - _per_cell(lse[tokens], part)
            if keep:
                ctx.kept[tokens.start] = logits
            del logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, inner, outer, targets, cell_tokens, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, inner, outer, targets, cell_tokens, lse = ctx.saved_tensors
        grads = [
            torch.zeros_like(tensor, dtype=dtype) if needed else None
            for tensor, needed, dtype in zip(
                (hidden, weight, inner, outer),
                ctx.needs_input_grad,
                (None, torch.float32, None, torch.float32),
                strict=False,
            )
        ]
        for part in _parts(hidden, targets, cell_tokens):
            tokens, gradient = part.tokens, upstream[0][part.cells]
            # The host would have to wait for a GPU to know whether there is any.
            if device_type(gradient) == "cuda" or gradient.any():
                logits = ctx.kept.pop(tokens.start, None)  # once: _delta overwrites it
                if logits is None:
                    logits = _logits(hidden[tokens], weight, _cut(inner, tokens), outer, ctx.cuts)
                delta = _delta(logits, lse[tokens], part, gradient).to(hidden.dtype)
                _accumulate(grads, tokens, delta, (hidden, weight, inner, outer), ctx.cuts)
                del logits, delta
        _match(grads, (hidden, weight, inner, outer))
        return (*grads, None, None, None, None)


class _FrozenLogprobs(torch.autograd.Function):
    """Logprobs with d logp / d hidden = (onehot(target) - p) @ weight; keeps that, [T, D].

    The difference is taken in float32, before the product: for a confident token, weight[target] and
    p @ weight are nearly equal, and in bfloat16 their difference would vanish.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        result = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        saved = torch.empty_like(hidden)
        ones = torch.ones(min(chunk_tokens(hidden), len(hidden)), device=hidden.device)
        for part in _parts(hidden, targets, None):
            logits = _logits(hidden[part.tokens], weight, None, None)
            lse = logits.logsumexp(-1)
            result[part.cells] = _pick(logits, part) - lse
            delta = _delta(logits, lse, part, ones[: len(lse)]).to(weight.dtype)
            torch.mm(delta, weight, out=saved[part.tokens])
            del logits, delta
        ctx.save_for_backward(saved)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        return saved * upstream[0].to(saved.dtype)[:, None], None, None


def _parts(hidden: torch.Tensor, targets: torch.Tensor, cell_tokens: torch.Tensor | None) -> Iterator[_Part]:
    tokens, size = len(hidden), chunk_tokens(hidden)
    chunks = [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
    if cell_tokens is None:
        yield from (_Part(chunk, chunk, None, targets[chunk]) for chunk in chunks)
        return
    edges = torch.tensor([chunk.start for chunk in chunks], device=cell_tokens.device)
    bounds = [*torch.searchsorted(cell_tokens, edges).tolist(), len(targets)]
    for chunk, start, stop in zip(chunks, bounds, bounds[1:], strict=False):
        cells = slice(start, stop)
        yield _Part(chunk, cells, cell_tokens[cells] - chunk.start, targets[cells])


def _cut(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    inner: torch.Tensor | None,
    outer: torch.Tensor | None,
    cuts: Sequence[int] = (),
) -> torch.Tensor:
    """Compute logits [n, V] float32."""
    logits = wide_product(hidden, weight.T, cuts)
    if inner is not None and outer is not None:
        add_wide_product(logits, inner, outer.T)
    return logits


def _pick(logits: torch.Tensor, part: _Part) -> torch.Tensor:
    """Return the logits of the cells, [c]."""
    if part.rows is None:
        return logits.gather(-1, part.targets[:, None])[:, 0]
    return logits[part.rows, part.targets]


def _per_cell(values: torch.Tensor, part: _Part) -> torch.Tensor:
    return values if part.rows is None else values[part.rows]


def _delta(logits: torch.Tensor, lse: torch.Tensor, part: _Part, upstream: torch.Tensor) -> torch.Tensor:
    """Overwrite logits by d loss / d logits = sum over a token's cells of (onehot - softmax) * upstream."""
    if part.rows is None:
        delta = logits.sub_(lse[:, None]).exp_().mul_(-upstream[:, None])
        return delta.scatter_add_(-1, part.targets[:, None], upstream[:, None])
    total = torch.zeros_like(lse).index_add_(0, part.rows, upstream)
    delta = logits.sub_(lse[:, None]).exp_().mul_(-total[:, None])
    return delta.index_put_((part.rows, part.targets), upstream, accumulate=True)


def _accumulate(
    grads: list[torch.Tensor | None],
    part: slice,
    delta: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    cuts: Sequence[int],
) -> None:
    hidden, weight, inner, outer = inputs
    of_hidden, of_weight, of_inner, of_outer = grads
    if of_hidden is not None:
        multiply(delta, weight, of_hidden[part], cuts)
    if of_weight is not None:
        add_wide_product(of_weight, delta.T, hidden[part])
    if of_inner is not None and outer is not None:
        torch.mm(delta, outer, out=of_inner[part])
    if of_outer is not None and inner is not None:
        add_wide_product(of_outer, delta.T, inner[part])


def _match(grads: list[torch.Tensor | None], inputs: tuple[torch.Tensor | None, ...]) -> None:
    """Convert gradients, which were summed in float32, to their input's type."""
    for index, (grad, tensor) in enumerate(zip(grads, inputs, strict=True)):
        if grad is not None and tensor is not None:
            grads[index] = grad.to(tensor.dtype)
