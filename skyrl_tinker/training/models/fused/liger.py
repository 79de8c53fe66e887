"""Kernels of liger-kernel (Triton, for CUDA), where it is installed, and what stands for them elsewhere.

The stand-ins compute the same, take and write the same memory, and count as one operation each: fake tensors
run through them, and a CPU that is told to take the way of CUDA.
"""

from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

from skyrl_tinker.training.models.fused.activations import activated, activated_backward


@cache
def installed() -> bool:
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


def name() -> str:
    return f"liger-kernel {metadata.version('liger-kernel')}"


def gated_product(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute act(gate) * up, with silu or the tanh form of gelu; all contiguous."""
    product: torch.Tensor
    if gate.is_cuda:
        *_, product = _kernel("swiglu_forward" if kind == "silu" else "geglu_forward")(gate, up)
    else:
        product = _gated_product(gate, up, kind)
    return product


def gated_product_backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, kind: str) -> None:
    """Write over gate and up with their gradients."""
    if gate.is_cuda:
        _kernel("swiglu_backward" if kind == "silu" else "geglu_backward")(gate, up, dy)
    else:
        _gated_product_backward(gate, up, dy, kind)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [1, H, T, D] and k [1, Hkv, T, D] in place, where they lie in memory as [1, T, H, D]."""
    if q.is_cuda:
        q, k, *_ = _kernel("rope_forward")(q, k, cos, sin)
        return q, k
    rows = [tensor.transpose(1, 2).contiguous() for tensor in (q, k)]
    _rotate(*rows, cos, sin)
    q, k = (tensor.transpose(1, 2) for tensor in rows)
    return q, k


def _kernel(name: str) -> Any:
    module = import_module(f"liger_kernel.ops.{name.partition('_')[0]}")
    return getattr(module, name)


@torch.library.custom_op("skyrl_tinker::gated_product", mutates_args=())
def _gated_product(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return activated(gate, kind).mul_(up)


@_gated_product.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("skyrl_tinker::gated_product_backward", mutates_args=("gate", "up"))
def _gated_product_backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, kind: str) -> None:
    of_gate, of_up = activated_backward(dy * up, gate, kind), activated(gate, kind).mul_(dy)
    gate.copy_(of_gate)
    up.copy_(of_up)


@torch.library.custom_op("skyrl_tinker::rotate", mutates_args=("q", "k"))
def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q and k [1, T, heads, D]."""
    for tensor in (q, k):
        first, second = tensor.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        tensor.copy_(tensor * cos[:, :, None] + turned * sin[:, :, None])
