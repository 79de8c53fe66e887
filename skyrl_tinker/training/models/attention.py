"""Causal attention within each segment of a packed row: no sequence sees another.

A model may have sinks [H]: logits of one more token for each head, which every token sees and whose value is
zero.
"""

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from skyrl_tinker.training.batching.packed_row import Segments
from skyrl_tinker.training.models.fused import flash_attention
from skyrl_tinker.training.models.fused.flash_attention import HeadShape

IMPLEMENTATION = "skyrl_tinker_packed"
"""Name by which transformers finds the chosen kernel; it builds no mask for names that it does not know."""

PLANNED = f"{IMPLEMENTATION}_planned"
"""Name of the kernel that fake tensors run through: `register_planned`."""

_FLASH = "flash_attn"
_HALF = (torch.float16, torch.bfloat16)
_log = logging.getLogger(__name__)

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Segments, float | None, int | None], torch.Tensor
]
"""(q [1, H, T, D], k and v [1, Hkv, T, D], segments, scale, window) -> [T, H, D]

A window of W tokens: each token sees itself and the W - 1 before it. None: all before it.
"""

SinkKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Segments, float | None, int | None, torch.Tensor], torch.Tensor
]
"""The same with the sinks [H]."""


def register(device: str, dtype: torch.dtype, config: PreTrainedConfig) -> None:
    """Choose the kernel of a model for this process. Idempotent."""
    name, kernel = choose_newest(device, dtype, shape_of(config))
    _log.info("attention on %s in %s: %s", device, dtype, name)
    AttentionInterface.register(IMPLEMENTATION, partial(_attend, kernel, choose_for_sinks(device, dtype)))


def register_planned(device: str, dtype: torch.dtype) -> None:
    """Register a kernel for fake tensors that keeps the same tensors for backward as the chosen kernel.

    For flash_attn it is torch's varlen_attn, which supports fake tensors; both keep q, k, v, the output and
    its log-sum-exp.
    """
    name, kernel = choose(device, dtype)
    if name == _FLASH:
        kernel = _varlen_kernel() or kernel
    AttentionInterface.register(PLANNED, partial(_attend, kernel, choose_for_sinks(device, dtype)))


def shape_of(config: PreTrainedConfig) -> HeadShape:
    heads = config.num_attention_heads
    return HeadShape(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        sinks=config.model_type == "gpt_oss",
    )


def choose_newest(device: str, dtype: torch.dtype, shape: HeadShape) -> tuple[str, Kernel]:
    """Choose a kernel; torch's own if it can run FlashAttention 3 or 4, which this process then does."""
    name, kernel = choose(device, dtype)
    varlen = _varlen_kernel() if device == "cuda" and dtype in _HALF else None
    if varlen is not None:
        tried: Callable[..., torch.Tensor] = varlen
        if shape.sinks:
            tried = partial(_flash_with_sinks, sinks=torch.zeros(shape.heads, device=device))
        if newer := flash_attention.activate(tried, device, shape):
            return f"varlen_attn of torch by {newer}", varlen
    return name, kernel


def choose(device: str, dtype: torch.dtype) -> tuple[str, Kernel]:
    """Choose a kernel; the flash kernels are for CUDA and 16-bit types only."""
    if device == "cuda" and dtype in _HALF:
        # flash-attn 4 has the package without the function, some builds of torch have no varlen_attn
        if (flash := _find("flash_attn", "flash_attn_varlen_func")) is not None:
            return _FLASH, partial(_varlen_attn, partial(flash, causal=True), "softmax_scale")
        if (varlen := _varlen_kernel()) is not None:
            return "varlen_attn of torch", varlen
    return "SDPA by segments", _segment_by_segment


def choose_for_sinks(device: str, dtype: torch.dtype) -> SinkKernel:
    """Choose a kernel for models with sinks: on CUDA torch's own of FlashAttention-2."""
    return _flash_with_sinks if device == "cuda" and dtype in _HALF else _segment_by_segment


def _varlen_kernel() -> Kernel | None:
    varlen = _find("torch.nn.attention.varlen", "varlen_attn")
    return varlen and partial(_varlen_attn, partial(varlen, **_grouped_queries(varlen)), "scale")


def _find(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a module, or None where the module or the function is absent."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _grouped_queries(varlen_attn: Callable[..., Any]) -> dict[str, bool]:
    """Return the keyword arguments that allow several query heads per key head; torch 2.11 needs none."""
    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _attend(
    kernel: Kernel,
    sink_kernel: SinkKernel,
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,  # the sinks
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run the kernel behind the interface of transformers; returns ([1, T, H, D], None)."""
    if s_aux is not None:
        return sink_kernel(query, key, value, segments, scaling, sliding_window, s_aux)[None], None
    return kernel(query, key, value, segments, scaling, sliding_window)[None], None


def _segment_by_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    sizes = [count * length for count, length in segments.runs]
    q, k, v = (torch.split(tensor.squeeze(0), sizes, 1) for tensor in (query, key, value))
    attend = _attend_run if sinks is None else partial(_attend_run_with_sinks, sinks)
    outputs = [attend(*part, scaling, window) for part in zip(q, k, v, segments.runs, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend in one batch of SDPA: [heads, count * length, D] each -> [count * length, H, D]."""
    q, k, v = (tensor.view(len(tensor), *run, -1).transpose(0, 1) for tensor in (query, key, value))
    seen = None if window is None or run[1] <= window else _seen(run[1], window, query.device)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def _attend_run_with_sinks(
    sinks: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend by the definition; shapes as those of `_attend_run`. Keeps [count, H, length, length]."""
    q, k, v = (tensor.view(len(tensor), *run, -1).transpose(0, 1) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(len(query) // len(key), 1) for tensor in (k, v))
    unseen = ~_seen(run[1], run[1] if window is None else window, query.device)
    scores = (q @ k.mT * (scaling or q.shape[-1] ** -0.5)).masked_fill(unseen, -torch.inf)
    every = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    out = every.softmax(-1)[..., :-1] @ v
    return out.transpose(1, 2).flatten(0, 1)


def _seen(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return [length, length]: which tokens (columns) each token sees."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _varlen_attn(
    varlen_attn: Callable[..., Any],
    scale: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend by a kernel for packed segments; `scale`: its name for the scaling."""
    bounds, longest = segments.cu_seqlens, segments.longest
    q, k, v = _tokens_first(query, key, value)
    options = {scale: scaling, "window_size": _reach(window)}
    out: torch.Tensor = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
    return out


def _flash_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    out: torch.Tensor = _FlashWithSinks.apply(  # type: ignore[no-untyped-call]
        *_tokens_first(query, key, value), sinks, segments, scaling, window
    )
    return out


class _FlashWithSinks(torch.autograd.Function):
    """FlashAttention-2 (arXiv:2307.08691) with sinks; q [T, H, D], k and v [T, Hkv, D], sinks [H].

    Its forward gives outputs and the log-sum-exp Z of the scores [H, T]. With sinks s it is Z' = log(exp Z +
    exp s), and outputs are smaller by exp(Z - Z'). Its backward makes probabilities and their gradients from
    outputs and log-sum-exp alone, so that it is right with these two as well; the sinks' gradient is the
    same formula for a token of value zero: minus the sum over tokens of exp(s - Z') (dO . O).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        segments: Segments,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        bounds, longest, (left, right) = segments.cu_seqlens, segments.longest, _reach(window)
        ctx.lengths = bounds, bounds, longest, longest, 0.0, window is None
        ctx.options = {"scale": scaling, "window_size_left": left, "window_size_right": right}
        without, partial_sum, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ctx.lengths, False, **ctx.options
        )
        total = torch.logaddexp(partial_sum, sinks.float()[:, None])
        out: torch.Tensor = without * (partial_sum - total).exp().T[..., None].to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, state, unused)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, total, state, unused = ctx.saved_tensors
        dout = upstream[0].contiguous()
        gradients = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, total, *ctx.lengths, state, unused, **ctx.options
        )
        shares = (sinks.float()[:, None] - total).exp()  # [H, T]
        dsinks = -(shares * (dout.float() * out.float()).sum(-1).T).sum(1)
        return *gradients, dsinks.to(sinks.dtype), None, None, None


def _reach(window: int | None) -> tuple[int, int]:
    """Return the tokens that each sees to its left and right, as the flash kernels count; -1: all."""
    return (-1 if window is None else window - 1, 0)


def _tokens_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Transpose each: [1, heads, T, D] -> [T, heads, D]."""
    return [tensor[0].transpose(0, 1).contiguous() for tensor in tensors]
