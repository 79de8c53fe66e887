"""Kernels of liger-kernel (Triton, for CUDA), where it is installed, and stand-ins for them elsewhere.

On a GPU each kernel is first tried with the shapes of the model; if it fails, torch's operations replace it.
A stand-in computes the same, takes and writes the same memory, and counts as one operation. Stand-ins are for
fake tensors, and for a CPU on the code path of CUDA (`planned_device`).
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch

from skyrl_tinker.system.packages import is_installed
from skyrl_tinker.training.models.fused.activations import activated, activated_backward
from skyrl_tinker.training.models.fused.flash_attention import HeadShape
from skyrl_tinker.training.models.fused.kernel_trial import fault_of

_TOKENS = 70  # of a trial
_log = logging.getLogger(__name__)


@cache
def installed() -> bool:
    return is_installed("liger_kernel") and is_installed("triton")


def name() -> str:
    return f"liger-kernel {metadata.version('liger-kernel')}"


def multiplies(kind: str, width: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether it computes gated products of this width; `kind`: silu or gelu."""
    return installed() and (device != "cuda" or _multiplies_well(kind, width, dtype, device))


def rotates(shape: HeadShape, dtype: torch.dtype, device: str) -> bool:
    """Return whether it computes rotary embeddings of these heads."""
    return installed() and (device != "cuda" or _rotates_well(shape, dtype, device))


class Kernels(NamedTuple):
    """Functions of one place."""

    gated_product: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
    """act(gate) * up, with silu or the tanh form of gelu; all contiguous."""
    gated_product_backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], None]
    """Writes over gate and up with their gradients."""
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Rotates q [1, H, T, D] and k [1, Hkv, T, D] in place, where they lie in memory as [1, T, H, D]."""


def kernels_for(tensor: torch.Tensor) -> Kernels:
    return LIGER if tensor.is_cuda else STAND_INS


def module(name: str) -> Any:
    return import_module(f"liger_kernel.ops.{name}")


def _product(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    forward = module("swiglu").swiglu_forward if kind == "silu" else module("geglu").geglu_forward
    product: torch.Tensor = forward(gate, up)[-1]
    return product


def _product_backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, kind: str) -> None:
    backward = module("swiglu").swiglu_backward if kind == "silu" else module("geglu").geglu_backward
    backward(gate, up, dy)


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, *_ = module("rope").rope_forward(q, k, cos, sin)
    return q, k


LIGER = Kernels(_product, _product_backward, _rotated)


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


def _turned(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [tensor.transpose(1, 2).contiguous() for tensor in (q, k)]
    _rotate(rows[0], rows[1], cos, sin)
    return rows[0].transpose(1, 2), rows[1].transpose(1, 2)


STAND_INS = Kernels(_gated_product, _gated_product_backward, _turned)


# Trials


@cache
def _multiplies_well(kind: str, width: int, dtype: torch.dtype, device: str) -> bool:
    gate, up, dy = _normal(3 * [(1, _TOKENS, width)], dtype, device)

    def results(kernels: Kernels) -> list[torch.Tensor]:
        of_gate, of_up = gate.clone(), up.clone()
        product = kernels.gated_product(of_gate, of_up, kind)
        kernels.gated_product_backward(of_gate, of_up, dy, kind)
        return [product, of_gate, of_up]

    return _agrees(f"gated products ({kind}) of width {width} in {dtype}", results)


@cache
def _rotates_well(shape: HeadShape, dtype: torch.dtype, device: str) -> bool:
    sizes = [(1, _TOKENS, heads, shape.size) for heads in (shape.heads, shape.key_heads)]
    *rows, angles = _normal([*sizes, (1, _TOKENS, shape.size // 2)], dtype, device)
    cos, sin = (function(angles).repeat(1, 1, 2) for function in (torch.cos, torch.sin))

    def results(kernels: Kernels) -> list[torch.Tensor]:
        q, k = (row.clone().transpose(1, 2) for row in rows)
        rotated = [each.clone() for each in kernels.rotate(q, k, cos, sin)]
        return [*rotated, *kernels.rotate(*rotated, cos, -sin)]

    return _agrees(f"rotary embeddings of {shape.heads} heads of {shape.size} in {dtype}", results)


def _agrees(work: str, results: Callable[[Kernels], list[torch.Tensor]]) -> bool:
    """Compare, forward and backward, with the stand-ins; log why torch's operations compute instead."""
    fault = fault_of(partial(results, LIGER), results(STAND_INS))
    if fault is not None:
        _log.warning("%s is installed but not used for %s: %s", name(), work, fault)
    return fault is None


def _normal(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
