"""Products act(gate) * up of an MLP; on CUDA they keep gate and up only, and compute the rest again."""

from typing import Any

import torch
from torch import nn

from skyrl_tinker.training.models.fused import liger
from skyrl_tinker.training.models.fused.activations import activated, activated_backward, kind_of
from skyrl_tinker.training.models.planned_device import device_type


def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Run Llama's MLP, with any activation."""
    y: torch.Tensor = module.down_proj(gated(module.act_fn, module.gate_proj(x), module.up_proj(x)))
    return y


def gated(act_fn: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    kind = kind_of(act_fn)
    product: torch.Tensor
    if kind is None or device_type(gate) != "cuda":
        product = act_fn(gate) * up
    else:
        contiguous = gate.is_contiguous() and up.is_contiguous()  # halves of a wider tensor are not
        suits = contiguous and liger.multiplies(kind, gate.shape[-1], gate.dtype, gate.device.type)
        way = _ByLiger if suits else _ByTorch
        product = way.apply(gate, up, kind)  # type: ignore[no-untyped-call]
    return product


class _ByLiger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        return liger.kernels_for(gate).gated_product(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients in the memory of gate and up, which nobody else keeps."""
        gate, up = ctx.saved_tensors
        dy = upstream[0].contiguous()
        liger.kernels_for(gate).gated_product_backward(gate, up, dy, ctx.kind)
        return gate, up, None


class _ByTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        return activated(gate, kind).mul_(up)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        of_gate = activated_backward(upstream[0] * up, gate, ctx.kind)
        return of_gate, activated(gate, ctx.kind).mul_(upstream[0]), None
