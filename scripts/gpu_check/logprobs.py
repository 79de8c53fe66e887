"""Logprobs and their gradients in bfloat16 against float64, of tokens of any confidence."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from gpu_check.checks import Check
from gpu_check.rows import Row, at_most
from gpu_check.setting import Setting
from skyrl_tinker.training.models.logprobs import Head, token_logprobs

VOCAB = 151_936
RANK = 8
PROBABILITIES = (0.5, 0.9, 0.99, 0.999)
ERROR = 1e-3
"""Bound of the error of a logprob."""
GRADIENT_ERROR = 1e-2
"""Bound of the L2 norm of a gradient's error, relative to the gradient's."""
TOKENS = {"frozen head": 300, "few tokens": 16, "adapted head": 300}
SMALL_TOKENS = {"frozen head": 32, "few tokens": 16, "adapted head": 32}
"""Number that makes `token_logprobs` take each of its ways: backward from what forward made, from logits that
were kept, and from logits computed again."""


class Case(NamedTuple):
    """Leaves, and targets [T] of which each has about the wanted probability."""

    hidden: torch.Tensor  # [T, D]
    weight: torch.Tensor  # [V, D], frozen
    inner: torch.Tensor | None  # [T, r]
    outer: torch.Tensor | None  # [V, r]
    targets: torch.Tensor

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        named = {"hidden": self.hidden, "inner": self.inner, "outer": self.outer}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, dtype: torch.dtype) -> "Case":
        """Convert the leaves, to new ones."""
        inner, outer = (
            None if each is None else each.detach().to(dtype) for each in (self.inner, self.outer)
        )
        case = Case(self.hidden.detach().to(dtype), self.weight.to(dtype), inner, outer, self.targets)
        for leaf in case.leaves.values():
            leaf.requires_grad_()
        return case


def checks(setting: Setting) -> list[Check]:
    counts = SMALL_TOKENS if setting.small else TOKENS
    return [
        Check(f"logprobs, {way}, p = {p}", partial(_errors, setting, way, tokens, p))
        for way, tokens in counts.items()
        for p in PROBABILITIES
    ]


def _errors(setting: Setting, way: str, tokens: int, p: float) -> Iterator[Row]:
    case = _case(setting, tokens, p, adapted=way == "adapted head")
    upstream = torch.linspace(0.5, 1.5, tokens, device=setting.device)
    head = Head(case.weight, case.inner, case.outer)
    found = token_logprobs(case.hidden, head, case.targets, dense=True)
    gradients = torch.autograd.grad(found, list(case.leaves.values()), upstream)
    exact = case.to(torch.float64)
    expected = _definition(exact)
    expected_gradients = torch.autograd.grad(expected, list(exact.leaves.values()), upstream.double())
    title = f"logprobs in bfloat16, {way}, p = {float(expected.detach().exp().median()):.4f}"
    yield at_most(f"{title}: error", float((found - expected).detach().abs().max()), ERROR)
    for name, gradient, other in zip(case.leaves, gradients, expected_gradients, strict=True):
        error = float((gradient.double() - other).norm() / other.norm())
        yield at_most(f"{title}: error of d/d {name}", error, GRADIENT_ERROR)


def _definition(case: Case) -> torch.Tensor:
    logits = case.hidden @ case.weight.T
    if case.inner is not None and case.outer is not None:
        logits = logits + case.inner @ case.outer.T
    return logits.log_softmax(-1).gather(-1, case.targets[:, None])[:, 0]


def _case(setting: Setting, tokens: int, p: float, *, adapted: bool) -> Case:
    """Turn random hidden states towards their targets' rows of the head until these are as likely as `p`."""
    size = 64 if setting.small else 1024
    generator = torch.Generator(setting.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=setting.device)

    hidden, weight = normal(tokens, size), normal(VOCAB, size) * size**-0.5
    targets = torch.randint(VOCAB, (tokens,), generator=generator, device=setting.device)
    directions = weight[targets] / weight[targets].square().sum(-1, keepdim=True)
    inner, outer = (normal(tokens, RANK), normal(VOCAB, RANK) * 0.1) if adapted else (None, None)
    start = hidden @ weight.T + (0.0 if inner is None or outer is None else inner @ outer.T)
    hidden += _distances(start, directions @ weight.T, targets, p) * directions
    return Case(hidden, weight, inner, outer, targets).to(torch.bfloat16)


def _distances(start: torch.Tensor, step: torch.Tensor, targets: torch.Tensor, p: float) -> torch.Tensor:
    """Bisect for x [T, 1] such that softmax(start + x * step) has `p` at the targets."""
    low, high = torch.zeros_like(start[:, :1]), torch.full_like(start[:, :1], 200.0)
    for _ in range(16):
        middle = (low + high) / 2
        found = (start + middle * step).softmax(-1).gather(-1, targets[:, None])
        low, high = torch.where(found < p, middle, low), torch.where(found < p, high, middle)
    return high
