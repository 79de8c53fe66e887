"""Attention kernels against its definition in float32."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gpu_check.checks import Check
from gpu_check.rows import Row, at_most, measured
from gpu_check.setting import Setting
from skyrl_tinker.training.batching.packed_row import Segments
from skyrl_tinker.training.models import attention
from skyrl_tinker.training.models.attention import AttentionInputs


class Shape(NamedTuple):
    lengths: tuple[int, ...]
    heads: int
    key_heads: int
    size: int

    def segments(self, device: str) -> Segments:
        bounds = torch.tensor([0, *self.lengths], device=device).cumsum(0).to(torch.int32)
        return Segments(tuple((1, length) for length in self.lengths), bounds, max(self.lengths))

    def of_a_model(self) -> attention.HeadShape:
        return attention.HeadShape(self.heads, self.key_heads, self.size)


SHAPE = Shape((1, 7, 129, 4096), 32, 8, 128)
SMALL = Shape((1, 7, 129), 4, 2, 32)
WINDOW = 100
LONG = 16384
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of the L2 norm of an error, relative to that of the tensor; bfloat16 rounds to 0.4 %."""


def checks(setting: Setting) -> list[Check]:
    shape = SMALL if setting.small else SHAPE
    return [
        Check("attention in bfloat16", lambda: _errors(setting, shape, torch.bfloat16, None)),
        Check("attention in float32", lambda: _errors(setting, shape, torch.float32, None)),
        Check("sliding window in bfloat16", lambda: _errors(setting, shape, torch.bfloat16, WINDOW)),
        Check("time of attention", lambda: _time(setting, shape)),
    ]


def _errors(setting: Setting, shape: Shape, dtype: torch.dtype, window: int | None) -> Iterator[Row]:
    name, kernel = attention.choose_newest(setting.device, dtype, shape.of_a_model())
    tensors, upstream = _tensors(setting, shape, dtype)
    out = kernel(AttentionInputs(*tensors, shape.segments(setting.device), window=window))
    found = [out.detach(), *torch.autograd.grad(out, tensors, upstream)]
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    expected_out = _definition(exact, shape.lengths, window)
    expected = [expected_out.detach(), *torch.autograd.grad(expected_out, exact, upstream.float())]
    what = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    title = "attention" if window is None else f"attention, window of {window}"
    for part, one, other in zip(what, found, expected, strict=True):
        error = float((one.float() - other).norm() / other.norm())
        yield at_most(f"{title}, {str(dtype)[6:]}, {name}: error of {part}", error, BOUNDS[dtype])


def _tensors(
    setting: Setting, shape: Shape, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return queries, keys and values [1, heads, T, D], and the upstream gradient [T, heads, D]."""
    tokens = sum(shape.lengths)
    generator = torch.Generator(setting.device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=setting.device).to(dtype)

    q, k, v = (
        normal(1, heads, tokens, shape.size).requires_grad_()
        for heads in (shape.heads, shape.key_heads, shape.key_heads)
    )
    return (q, k, v), normal(tokens, shape.heads, shape.size)


def _definition(tensors: list[torch.Tensor], lengths: tuple[int, ...], window: int | None) -> torch.Tensor:
    """Softmax of scaled scores, of each segment by itself; a token sees itself and those before it.

    `window`: how many in all.
    """
    group = tensors[0].shape[1] // tensors[1].shape[1]
    outputs = []
    parts = (torch.split(tensor[0], list(lengths), 1) for tensor in tensors)
    for one, two, three in zip(*parts, strict=True):
        keys, values = two.repeat_interleave(group, 0), three.repeat_interleave(group, 0)
        scores = one @ keys.transpose(1, 2) * one.shape[-1] ** -0.5
        ones = torch.ones(scores.shape[1:], dtype=torch.bool, device=one.device)
        unseen = ones.triu(1) if window is None else ones.triu(1) | ones.tril(-window)
        outputs.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


def _time(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Time forward and backward of one long sequence; backward has 2.5 times forward's products."""
    long = shape._replace(lengths=(256 if setting.small else LONG,))
    name, kernel = attention.choose_newest(setting.device, torch.bfloat16, shape.of_a_model())
    tensors, upstream = _tensors(setting, long, torch.bfloat16)
    given = AttentionInputs(*tensors, long.segments(setting.device))
    seconds = []
    for _ in range(4):
        setting.wait()
        started = time.perf_counter()
        torch.autograd.grad(kernel(given), tensors, upstream)
        setting.wait()
        seconds.append(time.perf_counter() - started)
    products = 3.5 * 2 * long.lengths[0] ** 2 * long.heads * long.size  # causal: half of 4 L^2 H D
    title = f"attention of {long.lengths[0]} tokens, {name}"
    yield measured(f"{title}: ms, forward and backward", 1000 * min(seconds))
    yield measured(
        f"{title}: TFLOP/s (FlashAttention-2 on an H100: about 400)", products / min(seconds) / 1e12
    )
