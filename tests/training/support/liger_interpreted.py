"""Kernels of liger-kernel, interpreted on a CPU, against what stands for them.

Runs in a process of its own: the interpreter is chosen before Triton is imported. In float32, since it
computes no bfloat16; without GeGLU, whose tanh comes from a library of CUDA.
"""

import json
import os
from typing import Any

import torch

from skyrl_tinker.training.models.fused import liger
from skyrl_tinker.training.models.fused.flash_attention import HeadShape


class Number(float):
    """Argument of a kernel, which the interpreter passes as it is and not as a scalar of Triton."""

    def to(self, _: Any) -> "Number":
        return self


def errors() -> dict[str, float]:
    """Return the largest difference of each result; those in place are read where they should lie."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    gate, up, dy = (normal(1, 5, 24) for _ in range(3))
    query, key = normal(1, 5, 4, 16).transpose(1, 2), normal(1, 5, 2, 16).transpose(1, 2)
    angles = normal(1, 5, 8).repeat(1, 1, 2)
    found, expected = (
        _results(gate.clone(), up.clone(), dy, query.clone(), key.clone(), angles, kernels)
        for kernels in (liger.LIGER, liger.STAND_INS)
    )
    return {name: float((found[name] - expected[name]).abs().max()) for name in expected}


def _results(
    gate: torch.Tensor,
    up: torch.Tensor,
    dy: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    angles: torch.Tensor,
    kernels: Any,
) -> dict[str, torch.Tensor]:
    product = kernels.gated_product(gate, up, "silu")
    kernels.gated_product_backward(gate, up, dy, "silu")
    kernels.rotate(query, key, angles.cos(), angles.sin())
    return {"product": product, "gate": gate, "up": up, "query": query, "key": key}


def trials() -> dict[str, bool]:
    """Return which trials the kernels pass: a block of theirs has at most 65,536 columns."""
    return {
        "products": liger._multiplies_well("silu", 24, torch.float32, "cpu"),
        "products too wide for it": liger._multiplies_well("silu", 65_537, torch.float32, "cpu"),
        "rotations": liger._rotates_well(HeadShape(4, 2, 16), torch.float32, "cpu"),
    }


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    setattr(liger.module("swiglu"), "float", Number)  # noqa: B010 - a name that the module does not have
    print(json.dumps({"errors": errors(), "trials": trials()}))
