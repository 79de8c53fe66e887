"""Activations of gated products, silu and the tanh form of gelu, with their derivatives."""

import torch
from torch import nn
from torch.nn import functional

_KINDS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu"}
"""Names by the class that transformers has for each."""


def kind_of(act_fn: nn.Module) -> str | None:
    """Return silu or gelu, or None for any other."""
    return _KINDS.get(type(act_fn).__name__)


def activated(gate: torch.Tensor, kind: str) -> torch.Tensor:
    return functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")


def activated_backward(dy: torch.Tensor, gate: torch.Tensor, kind: str) -> torch.Tensor:
    backward: torch.Tensor
    if kind == "silu":
        backward = torch.ops.aten.silu_backward(dy, gate)
    else:
        backward = torch.ops.aten.gelu_backward(dy, gate, approximate="tanh")
    return backward
