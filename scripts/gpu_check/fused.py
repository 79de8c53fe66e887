"""Fused layers of CUDA against the eager ones of transformers in float32, and the time of both."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from gpu_check.checks import Check
from gpu_check.rows import Row, at_most, measured, measured_together
from gpu_check.setting import Setting
from skyrl_tinker.training.models.fused import gated_products, liger, rms_norms, rotary
from skyrl_tinker.training.models.fused.flash_attention import HeadShape
from skyrl_tinker.training.models.planned_device import planning

Work = Callable[..., torch.Tensor]
NAMES = ("norm", "norm of heads", "norm of Gemma", "SwiGLU", "GeGLU", "rotary embedding")
GELU = "gelu_pytorch_tanh"
EPS = 1e-6
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the L2 norm of an error, relative to that of the tensor; bfloat16 rounds to 0.4 % each time."""


class Case(NamedTuple):
    """Fused layer and the eager one, as functions of leaves of these shapes."""

    fused: Work
    eager: Work
    leaves: Sequence[tuple[int, ...]]


def checks(setting: Setting) -> list[Check]:
    return [
        Check("fused layers", lambda: [measured("kernels of liger-kernel", _liger(setting))]),
        *(
            Check(f"{name} in {str(dtype)[6:]}", partial(_rows, setting, name, dtype))
            for name in NAMES
            for dtype in BOUNDS
        ),
    ]


def _liger(setting: Setting) -> str:
    """Name what computes in bfloat16; a trial that fails is in the log."""
    if not liger.installed():
        return "not installed: torch's operations"
    _, _, inner, *heads = _sizes(setting)
    place = torch.bfloat16, setting.device
    computed = {
        "SwiGLU": liger.multiplies("silu", inner, *place),
        "GeGLU": liger.multiplies("gelu", inner, *place),
        "rotary embedding": liger.rotates(HeadShape(*heads), *place),
    }
    refused = [name for name, works in computed.items() if not works]
    return f"{liger.name()}{', torch instead for ' * bool(refused)}{', '.join(refused)}"


def _sizes(setting: Setting) -> tuple[int, int, int, int, int, int]:
    """Return tokens, sizes of hidden and inner layers, heads, those of keys, and the size of each."""
    return (64, 128, 192, 4, 2, 32) if setting.small else (8192, 4096, 12288, 32, 8, 128)


def _cases(setting: Setting) -> dict[str, Case]:
    """Make those of the shape of Qwen3-8B, in a row of 8,192 tokens."""
    tokens, hidden, inner, heads, keys, size = _sizes(setting)
    normed, query = [(1, tokens, hidden), (hidden,)], (1, tokens, heads, size)
    pair, angles = [(1, tokens, inner)] * 2, _angles(setting, tokens, size)
    norm = partial(rms_norms.rms_norm, eps=EPS)
    return {
        "norm": Case(norm, partial(_norm, LlamaRMSNorm), normed),
        "norm of heads": Case(norm, partial(_norm, LlamaRMSNorm), [query, (size,)]),
        "norm of Gemma": Case(
            partial(rms_norms.rms_norm_one_plus, eps=EPS), partial(_norm, Gemma3RMSNorm), normed
        ),
        "SwiGLU": Case(partial(_gated, "silu"), partial(_product, "silu"), pair),
        "GeGLU": Case(partial(_gated, GELU), partial(_product, GELU), pair),
        "rotary embedding": Case(
            partial(_rotate, partial(rotary.apply, apply_rotary_pos_emb), angles),
            partial(_rotate, apply_rotary_pos_emb, angles),
            [query, (1, tokens, keys, size)],
        ),
    }


def _norm(kind: type[torch.nn.Module], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    module = kind(len(weight), eps=EPS)  # type: ignore[call-arg]
    out: torch.Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
    return out


def _gated(act: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply copies of the leaves: the kernel writes their gradients over them."""
    return gated_products.gated(ACT2FN[act], gate * 1, up * 1)


def _product(act: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = ACT2FN[act](gate) * up
    return product


def _rotate(
    apply: Callable[..., tuple[torch.Tensor, ...]],
    angles: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Rotate [1, T, heads, D]; both in one tensor. The kernel writes over copies of the leaves."""
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    rotated = apply((query * 1).transpose(1, 2), (key * 1).transpose(1, 2), cos, sin)
    return torch.cat([each.transpose(1, 2) for each in rotated], 2)


def _angles(setting: Setting, tokens: int, size: int) -> torch.Tensor:
    steps = 1e-6 ** (torch.arange(size // 2, device=setting.device) * 2 / size)
    half = torch.arange(tokens, device=setting.device)[:, None] * steps
    return torch.cat([half, half], -1)[None]


def _rows(setting: Setting, name: str, dtype: torch.dtype) -> Iterator[Row]:
    case = _cases(setting)[name]
    generator = torch.Generator(setting.device).manual_seed(0)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=setting.device).to(dtype)

    leaves = [normal(shape).requires_grad_() for shape in case.leaves]
    upstream = normal(case.eager(*leaves).shape)
    found = _run(case.fused, leaves, upstream)
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = _run(case.eager, exact, upstream.float())
    error = max(
        float((one.float() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)
    )
    title = f"{name} in {str(dtype)[6:]}"
    yield at_most(f"{title}: error of values and gradients", error, BOUNDS[dtype])
    if dtype == torch.bfloat16:
        ways = {"fused": case.fused, "eager": case.eager}
        times = {f"ms {way}": _milliseconds(setting, work, leaves, upstream) for way, work in ways.items()}
        yield measured_together(f"{title}: forward and backward", times)


def _run(work: Work, leaves: Sequence[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    with planning("cuda"):  # on a CPU, what stands for CUDA's kernels
        out = work(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _milliseconds(
    setting: Setting, work: Work, leaves: Sequence[torch.Tensor], upstream: torch.Tensor
) -> float:
    seconds = []
    for _ in range(5):
        setting.wait()
        started = time.perf_counter()
        _run(work, leaves, upstream)
        setting.wait()
        seconds.append(time.perf_counter() - started)
    return 1000 * min(seconds)
