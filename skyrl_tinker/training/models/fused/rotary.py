"""Rotary embeddings of queries and keys; backward turns the gradients back by the same angles."""

from collections.abc import Callable
from typing import Any

import torch

from skyrl_tinker.training.models.fused import liger
from skyrl_tinker.training.models.fused.flash_attention import HeadShape
from skyrl_tinker.training.models.planned_device import device_type

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(q [1, H, T, D], k [1, Hkv, T, D], cos and sin [1, T, D]) -> q and k."""


def apply(
    plain: Rotate, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if device_type(q) != "cuda":
        return plain(q, k, cos, sin)
    shape = HeadShape(q.shape[1], k.shape[1], q.shape[-1])
    rotate = liger.kernels_for(q).rotate if liger.rotates(shape, q.dtype, q.device.type) else plain
    rotated: tuple[torch.Tensor, torch.Tensor] = _Rotation.apply(  # type: ignore[no-untyped-call]
        q, k, cos, sin, rotate
    )
    return rotated


class _Rotation(torch.autograd.Function):
    """Rotation, whose angles need no gradient. Liger's writes over q and k, and over their gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotate: Rotate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.rotate = rotate
        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *ctx.rotate(*upstream, cos, -sin), None, None, None
