"""Kernels for CUDA are chosen by what is installed; torch's own is called as each version takes it.

The functions themselves need a GPU: stand-ins with their signatures compute the same on a CPU.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyrl_tinker.training.batching.packed_row import Segments
from skyrl_tinker.training.models.attention import AttentionInputs, Kernel, choose, choose_for_sinks

LENGTHS = (1, 7, 7, 33)
WINDOWS = (None, 1, 7, 33)


def _segments() -> Segments:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return Segments(((1, 1), (2, 7), (1, 33)), bounds, max(LENGTHS))


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 16, generator=generator) for heads in (4, 2, 2))
    return query, key, value


def _inputs(scale: float | None, window: int | None) -> AttentionInputs:
    return AttentionInputs(*_tensors(), _segments(), scale, window)


def _attention(
    q: Any, k: Any, v: Any, bounds: torch.Tensor, scale: float | None, reach: tuple[int, int]
) -> torch.Tensor:
    """Attention of each segment by its definition; [T, H, D] each. `reach`: tokens to the left and right."""
    left, right = reach
    assert right == 0
    outputs = []
    for start, stop in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        heads = q.shape[1] // k.shape[1]
        one, two, three = q[start:stop], *(x[start:stop].repeat_interleave(heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", one, two) * (scale or q.shape[2] ** -0.5)
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        unseen = (distance < 0) | ((distance > left) if left >= 0 else False)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, three))
    return torch.cat(outputs)


def varlen_attn_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    assert max_q == max_k == max(LENGTHS)
    assert torch.equal(cu_seq_q, cu_seq_k)
    return _attention(query, key, value, cu_seq_q, scale, window_size)


def varlen_attn_2_13(*args: Any, enable_gqa: bool = False, **kwargs: Any) -> torch.Tensor:
    assert enable_gqa, "it refuses fewer key heads than query heads"
    return varlen_attn_2_11(*args, **kwargs)


@pytest.mark.parametrize("window", WINDOWS)
def test_attention_by_segments_is_its_definition(window: int | None) -> None:
    _, by_segments = choose("cpu", torch.float32)
    found = by_segments(_inputs(None, window))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in _tensors())
    reach = (-1 if window is None else window - 1, 0)
    torch.testing.assert_close(found, _attention(q, k, v, _segments().cu_seqlens, None, reach))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("varlen_attn", [varlen_attn_2_11, varlen_attn_2_13])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_varlen_attention_of_either_torch_is_that_by_segments(
    monkeypatch: pytest.MonkeyPatch,
    varlen_attn: Callable[..., torch.Tensor],
    scale: float | None,
    window: int | None,
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    name, kernel = choose("cuda", torch.bfloat16)
    assert name == "varlen_attn of torch"
    _, by_segments = choose("cpu", torch.float32)
    expected = by_segments(_inputs(scale, window))
    torch.testing.assert_close(kernel(_inputs(scale, window)), expected)


def test_without_it_attention_runs_by_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert choose("cuda", torch.bfloat16)[0] == "SDPA by segments"


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)]
)
def test_flash_attention_is_for_16_bit_types_on_cuda(device: str, dtype: torch.dtype) -> None:
    assert choose(device, dtype)[0] == "SDPA by segments"
    assert choose("cuda", torch.bfloat16)[0] == "varlen_attn of torch"


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_flash_attention_with_sinks_is_that_by_segments(
    monkeypatch: pytest.MonkeyPatch, scale: float | None, window: int | None
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    found, expected = (
        _gradients(choose_for_sinks(device, dtype), scale, window)
        for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32))
    )
    torch.testing.assert_close(found, expected)


def _gradients(kernel: Kernel, scale: float | None, window: int | None) -> list[torch.Tensor]:
    """Return the output and the gradients of q, k, v and the sinks."""
    leaves = [tensor.requires_grad_() for tensor in (*_tensors(), torch.tensor([-1.0, 0.0, 1.0, 3.0]))]
    q, k, v, sinks = leaves
    out = kernel(AttentionInputs(q, k, v, _segments(), scale, window, sinks))
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _scores(q: Any, k: Any, bounds: torch.Tensor, scale: float | None, left: int) -> torch.Tensor:
    """Scores [H, T, T] of the pairs that see each other, else minus infinity."""
    owners = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    unseen = (owners[:, None] != owners) | (distance < 0) | ((distance > left) if left >= 0 else False)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    return (scores * (scale or q.shape[2] ** -0.5)).masked_fill(unseen, -torch.inf)


def flash_forward(
    q: Any, k: Any, v: Any, bounds: Any, _bounds: Any, *rest: Any, scale: Any, **window: Any
) -> tuple[torch.Tensor, ...]:
    max_q, _, dropout, is_causal, debug = rest
    left, right = window["window_size_left"], window["window_size_right"]
    assert (max_q, dropout, is_causal, debug, right) == (max(LENGTHS), 0.0, left < 0, False, 0)
    scores = _scores(q, k, bounds, scale, left)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1), *torch.empty(3, 0)


def flash_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, *_: Any, scale: Any, **window: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients as FlashAttention-2 makes them: of outputs and log-sum-exp."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    p = (_scores(q, k, bounds, scale, window["window_size_left"]) - lse[..., None]).exp()
    dp = torch.einsum("qhd,khd->hqk", dout, values)
    ds = p * (dp - (dout * out).sum(-1).T[..., None]) * (scale or q.shape[2] ** -0.5)
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, dout)
    together = [tensor.unflatten(1, (-1, groups)).sum(2) for tensor in (dk, dv)]
    return torch.einsum("hqk,khd->qhd", ds, keys), *together
