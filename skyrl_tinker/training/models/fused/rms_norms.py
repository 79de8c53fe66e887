"""RMSNorm by torch's kernel: one operation forward and one backward, computed in float32.

It keeps its input and the inverse root per token, where eager code keeps three tensors of the input's size,
two of them in float32. Eager code rounds the normalized value before the weight multiplies it; the kernel
rounds once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from skyrl_tinker.training.models.planned_device import device_type

_Plain = Callable[[torch.Tensor], torch.Tensor]


def forward(module: nn.Module, plain: _Plain, x: torch.Tensor) -> torch.Tensor:
    """Run Llama's norm: weight * x / rms(x)."""
    if device_type(x) != "cuda":
        return plain(x)
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return rms_norm(x, weight, module.variance_epsilon)  # type: ignore[arg-type]


def forward_one_plus(module: nn.Module, plain: _Plain, x: torch.Tensor) -> torch.Tensor:
    """Run Gemma's norm: (1 + weight) * x / rms(x)."""
    if device_type(x) != "cuda":
        return plain(x)
    return rms_norm_one_plus(x, module.weight, module.eps)  # type: ignore[arg-type]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_cuda:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    y: torch.Tensor = _rms_norm(x, weight, eps)[0]
    return y


def rms_norm_one_plus(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y: torch.Tensor = _OnePlus.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


class _OnePlus(torch.autograd.Function):
    """Norm in float32 that keeps x in its own dtype: rounded to bfloat16, 1 + weight would lose digits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide, scale = x.float(), 1 + weight.float()
        if x.is_cuda:
            y, inverse = torch._fused_rms_norm(wide, x.shape[-1:], scale, eps)
        else:
            y, inverse = _rms_norm(wide, scale, eps)
        ctx.save_for_backward(x, weight, inverse)
        result: torch.Tensor = y.to(x.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dy, wide, scale, trains = upstream[0].float(), x.float(), 1 + weight.float(), ctx.needs_input_grad[1]
        if x.is_cuda:
            parts = [True, trains]
            dx, dw = torch.ops.aten._fused_rms_norm_backward(dy, wide, x.shape[-1:], inverse, scale, parts)
        else:
            dx, dw = _rms_norm_backward(dy, wide, scale, inverse, trains)
        return dx.to(x.dtype), dw.to(weight.dtype) if trains else None, None


# Stand-ins for CUDA's kernels: for fake tensors, and for a CPU on the code path of CUDA


@torch.library.custom_op("skyrl_tinker::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = x.float().square().mean(-1, keepdim=True).add(eps).rsqrt()
    normalized = x.float() * inverse
    return (normalized * weight.float()).to(x.dtype), inverse


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("skyrl_tinker::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, trains: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight; the latter is [0] if the weight does not train."""
    normalized = x.float() * inverse
    scaled = dy.float() * weight.float()
    dx = (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)) * inverse
    dw = (dy.float() * normalized).flatten(0, -2).sum(0) if trains else inverse.new_empty(0)
    return dx.to(x.dtype), dw.to(x.dtype)


@_rms_norm_backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, trains: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[-1] if trains else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    x, weight, inverse = ctx.saved_tensors
    trains = ctx.needs_input_grad[1]
    dx, dw = _rms_norm_backward(dy, x, weight, inverse, trains)
    return dx, dw if trains else None, None


_rms_norm.register_autograd(_backward, setup_context=_save)
