"""Causal attention within each segment of a packed row: no sequence sees another."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IMPLEMENTATION = "skyrl_tinker_packed"
"""Under this name transformers finds `packed_attention`; it builds no mask for names it does not know."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the sequences of a packed row of T tokens lie."""

    runs: tuple[tuple[int, int], ...]  # (count, length): so many neighbours of equal length
    cu_seqlens: torch.Tensor  # [S + 1] int32
    longest: int


def register() -> None:
    """Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Returns ([1, T, H, D], None)."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(query, key, value, segments, scaling), None
    sizes = [count * length for count, length in segments.runs]
    q, k, v = (torch.split(tensor.squeeze(0), sizes, 1) for tensor in (query, key, value))
    outputs = [_run(*part, scaling) for part in zip(q, k, v, segments.runs, strict=True)]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined[None], None


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: tuple[int, int],
    scaling: float | None,
) -> torch.Tensor:
    """[heads, count * length, D] each: as one batch of the SDPA kernel; returns [count * length, H, D]."""
    q, k, v = (tensor.view(len(tensor), *run, -1).transpose(0, 1) for tensor in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float | None
) -> torch.Tensor:
    """The flash kernel for packed rows (16-bit types on CUDA only)."""
    from torch.nn.attention.varlen import varlen_attn  # absent from builds without it

    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    bounds, longest = segments.cu_seqlens, segments.longest
    out = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(out, torch.Tensor)
    return out[None]
