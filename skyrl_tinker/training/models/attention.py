"""Causal attention within each segment of a packed row: no sequence sees another.

A model may have sinks [H]: logits of one more token for each head, which every token sees and whose value is
zero.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

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

_HALF = (torch.float16, torch.bfloat16)
_log = logging.getLogger(__name__)


class AttentionInputs(NamedTuple):
    """Queries [1, H, T, D], keys and values [1, Hkv, T, D] of a packed row.

    A window of W tokens: each token sees itself and the W - 1 before it. None: all before it. `scale`: of the
    scores, None: by the definition. `sinks`: [H].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    segments: Segments
    scale: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None

    @property
    def tokens_first(self) -> list[torch.Tensor]:
        """Queries, keys and values, each [T, heads, D]."""
        return [tensor[0].transpose(0, 1).contiguous() for tensor in self[:3]]

    @property
    def reach(self) -> tuple[int, int]:
        """Tokens that each sees to its left and right, as the flash kernels count; -1: all."""
        return (-1 if self.window is None else self.window - 1, 0)


Kernel = Callable[[AttentionInputs], torch.Tensor]
"""inputs -> [T, H, D]"""


def register(device: str, dtype: torch.dtype, config: PreTrainedConfig) -> None:
    """Choose the kernel of a model for this process. Idempotent."""
    name, kernel = choose_newest(device, dtype, shape_of(config))
    _log.info("attention on %s in %s: %s", device, dtype, name)
    AttentionInterface.register(IMPLEMENTATION, partial(_attend, kernel, choose_for_sinks(device, dtype)))


def register_planned(device: str, dtype: torch.dtype) -> None:
    """Register a kernel for fake tensors that keeps the same tensors for backward as the chosen kernel.

    FlashAttention keeps q, k, v, the output and its log-sum-exp in each version.
    """
    _, kernel = choose(device, dtype)
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
    """Choose a kernel; if torch's own can run FlashAttention 3 or 4, this process then does."""
    name, kernel = choose(device, dtype)
    if kernel is _segment_by_segment:
        return name, kernel
    sinks = torch.zeros(shape.heads, device=device) if shape.sinks else None
    kernel_of_sinks = _flash_with_sinks if shape.sinks else kernel

    def tried(*given: Any) -> torch.Tensor:
        return kernel_of_sinks(AttentionInputs(*given)._replace(sinks=sinks))

    newer = flash_attention.activate(tried, device, shape)
    return f"{name} by {newer}" if newer else name, kernel


def choose(device: str, dtype: torch.dtype) -> tuple[str, Kernel]:
    """Choose a kernel; the flash kernels are for CUDA and 16-bit types only."""
    if device == "cuda" and dtype in _HALF:
        with suppress(ImportError):  # some builds of torch lack it
            from torch.nn.attention.varlen import varlen_attn

            options = _grouped_queries(varlen_attn)
            return "varlen_attn of torch", partial(_varlen_attn, partial(varlen_attn, **options))
    return "SDPA by segments", _segment_by_segment


def choose_for_sinks(device: str, dtype: torch.dtype) -> Kernel:
    """Choose a kernel for models with sinks: on CUDA torch's own of FlashAttention-2."""
    return _flash_with_sinks if device == "cuda" and dtype in _HALF else _segment_by_segment


def _grouped_queries(varlen_attn: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword arguments that allow several query heads per key head; torch 2.11 needs none."""
    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _attend(
    kernel: Kernel,
    sink_kernel: Kernel,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,  # the sinks
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run the kernel behind the interface of transformers; returns ([1, T, H, D], None)."""
    given = AttentionInputs(query, key, value, segments, scaling, sliding_window, s_aux)
    return (kernel if s_aux is None else sink_kernel)(given)[None], None


def _segment_by_segment(given: AttentionInputs) -> torch.Tensor:
    """Attend run by run: [heads, count * length, D] each -> [count * length, H, D]."""
    runs = given.segments.runs
    parts = (torch.split(tensor[0], [count * length for count, length in runs], 1) for tensor in given[:3])
    attend = _attend_run if given.sinks is None else _attend_run_with_sinks
    outputs = [
        attend(given, *(each.view(len(each), *run, -1).transpose(0, 1) for each in of_run)).transpose(1, 2)
        for run, *of_run in zip(runs, *parts, strict=True)
    ]
    return torch.cat([out.flatten(0, 1) for out in outputs]) if len(outputs) > 1 else outputs[0].flatten(0, 1)


def _attend_run(given: AttentionInputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend in one batch of SDPA: [count, heads, length, D] each -> [count, H, length, D]."""
    length, window = q.shape[2], given.window
    seen = None if window is None or length <= window else _seen(length, window, q.device)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=given.scale, enable_gqa=True
    )


def _attend_run_with_sinks(
    given: AttentionInputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attend by the definition; shapes as those of `_attend_run`. Keeps [count, H, length, length]."""
    assert given.sinks is not None
    length = q.shape[2]
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    unseen = ~_seen(length, given.window or length, q.device)
    scores = (q @ k.mT * (given.scale or q.shape[-1] ** -0.5)).masked_fill(unseen, -torch.inf)
    every = torch.cat([scores, given.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return every.softmax(-1)[..., :-1] @ v


def _seen(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return [length, length]: which tokens (columns) each token sees."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _varlen_attn(varlen_attn: Callable[..., Any], given: AttentionInputs) -> torch.Tensor:
    """Attend by torch's kernel for packed segments."""
    bounds, longest = given.segments.cu_seqlens, given.segments.longest
    options = {"scale": given.scale, "window_size": given.reach}
    out: torch.Tensor = varlen_attn(*given.tokens_first, bounds, bounds, longest, longest, **options)
    return out


def _flash_with_sinks(given: AttentionInputs) -> torch.Tensor:
    out: torch.Tensor = _FlashWithSinks.apply(*given.tokens_first, given.sinks, given)  # type: ignore[no-untyped-call]
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
        given: AttentionInputs,
    ) -> torch.Tensor:
        bounds, longest, (left, right) = given.segments.cu_seqlens, given.segments.longest, given.reach
        ctx.lengths = bounds, bounds, longest, longest, 0.0, given.window is None
        ctx.options = {"scale": given.scale, "window_size_left": left, "window_size_right": right}
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
        return *gradients, dsinks.to(sinks.dtype), None
