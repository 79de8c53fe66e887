"""Versions, and what the installed torch and kernels offer."""

import inspect
import platform
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import transformers
from torch.distributed.fsdp import FSDPModule

from gpu_check.checks import Check
from gpu_check.models import CONFIGS
from gpu_check.rows import Row, at_most, measured, require, skipped
from gpu_check.setting import NOT_ON_CPU, Setting
from skyrl_tinker.training.models import attention

OLDEST_TORCH = (2, 11)
BY_SEGMENTS = "SDPA by segments"


def checks(setting: Setting) -> list[Check]:
    return [
        Check("versions", _versions),
        Check("GPU", lambda: _gpu(setting)),
        Check("functions of torch", _functions),
        Check("kernels", lambda: _kernels(setting)),
        Check("float32 products of bfloat16", lambda: _wide_product(setting)),
    ]


def _versions() -> Iterator[Row]:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    yield measured("python", platform.python_version())
    yield require("torch", version >= OLDEST_TORCH, torch.__version__, ">= 2.11")
    yield measured("transformers", transformers.__version__)
    yield measured("triton", "installed" if find_spec("triton") else "absent")
    precision = torch.get_float32_matmul_precision()
    yield require("precision of float32 products", precision == "highest", precision, "highest")


def _gpu(setting: Setting) -> Iterator[Row]:
    if setting.small:
        yield skipped("GPU", NOT_ON_CPU)
        return
    found = torch.cuda.get_device_properties(0)
    yield measured("GPU", found.name)
    yield measured("GPUs", float(torch.cuda.device_count()))
    yield measured("GPU memory, GiB", found.total_memory / 2**30)
    yield require(
        "GPU with bfloat16", torch.cuda.is_bf16_supported(), f"sm_{found.major}{found.minor}", ">= sm_80"
    )
    yield measured("CUDA of torch", str(torch.version.cuda))


def _functions() -> Iterator[Row]:
    from torch.nn.attention import varlen

    arguments = set(inspect.signature(varlen.varlen_attn).parameters)
    yield require(
        "varlen_attn takes scale and window_size", arguments >= {"scale", "window_size"}, "", "both"
    )
    yield measured("varlen_attn has enable_gqa", str("enable_gqa" in arguments))
    yield measured("FSDPModule has reset_iter_state", str(hasattr(FSDPModule, "reset_iter_state")))
    yield measured("torch.nn.functional has grouped_mm", str(hasattr(torch.nn.functional, "grouped_mm")))


def _kernels(setting: Setting) -> Iterator[Row]:
    shape = attention.shape_of(CONFIGS["8B"])
    name, _ = attention.choose_newest(setting.device, torch.bfloat16, shape)
    fits = (name == BY_SEGMENTS) == setting.small
    yield require("attention in bfloat16", fits, name, BY_SEGMENTS if setting.small else "a flash kernel")
    yield measured("attention in float32", attention.choose_newest(setting.device, torch.float32, shape)[0])


def _wide_product(setting: Setting) -> Iterator[Row]:
    if setting.small:
        yield skipped("torch.mm(out_dtype=float32)", NOT_ON_CPU)
        return
    left, right = (torch.randn(256, 256, device=setting.device).bfloat16() for _ in range(2))
    out = torch.empty(256, 256, device=setting.device)
    torch.mm(left, right, out_dtype=torch.float32, out=out)
    error = (out - left.float() @ right.float()).abs().max()
    yield at_most("torch.mm(out_dtype=float32): error", float(error), 1e-3)
