"""Names that SGLang imports and an environment for CPUs lacks; nothing of them is called there.

Python runs this file at its start where the directory is on PYTHONPATH; it acts with SGLANG_USE_CPU_ENGINE=1.
"""

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

SGL_KERNEL = (
    *("kvcacheio", "speculative", "flash_attn", "top_k", "sampling", "utils", "elementwise", "gemm", "moe"),
    "allreduce",
)
TORCHVISION = (
    *("transforms", "io", "ops", "models", "utils", "transforms.functional", "transforms.v2"),
    "transforms.v2.functional",
)
PINNING = ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "arange", "randn")


class AnyName(type):
    """Class of which every attribute is another such class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


def stub(name: str) -> Any:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []

    def attribute(wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return AnyName(wanted, (), {})

    module.__getattr__ = attribute
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


def install() -> None:
    import torch
    import transformers.utils

    known: Any = transformers.utils  # what is remembered before the stub would be found
    known.is_torchvision_available()
    if hasattr(known, "is_torchvision_v2_available"):
        known.is_torchvision_v2_available()
    stub("torchvision").__version__ = "0.0"
    for name in TORCHVISION:
        stub(f"torchvision.{name}")
    stub("sgl_kernel")
    for name in SGL_KERNEL:
        stub(f"sgl_kernel.{name}")
    stub("IPython")
    stub("IPython.display")
    for name in PINNING:
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    install()
