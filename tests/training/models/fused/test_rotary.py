"""Rotary embeddings compute, in both ways of CUDA, what eager code does, and turn gradients back."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from skyrl_tinker.training.models.fused import liger, rotary
from skyrl_tinker.training.models.planned_device import planning

TOKENS, SIZE = 7, 16


def _leaf(heads: int) -> torch.Tensor:
    """[1, heads, T, D], in memory as the network has it: [1, T, heads, D]."""
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(1, TOKENS, heads, SIZE, generator=generator).transpose(1, 2).requires_grad_()


def _angles() -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(TOKENS)[:, None] * 0.7 ** torch.arange(SIZE // 2)
    both = torch.cat([angles, angles], -1)[None]
    return both.cos(), both.sin()


@pytest.mark.parametrize("with_liger", [True, False], ids=["liger-kernel", "torch"])
def test_values_and_gradients_are_those_of_eager_code(
    with_liger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "installed", lambda: with_liger)
    leaves, angles = [_leaf(4), _leaf(2)], _angles()
    upstream = [torch.randn(leaf.shape) for leaf in leaves]
    expected = apply_rotary_pos_emb(*leaves, *angles)
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)
    inputs = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with planning("cuda"):
        found = rotary.apply(apply_rotary_pos_emb, inputs[0] * 1, inputs[1] * 1, *angles)
    kept = [each.clone() for each in found]
    gradients = torch.autograd.grad(found, inputs, [each.clone() for each in upstream])
    torch.testing.assert_close([*kept, *gradients], [*expected, *expected_gradients])


def test_liger_turns_queries_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "installed", lambda: True)
    leaves = [_leaf(4).detach(), _leaf(2).detach()]
    with planning("cuda"):
        found = rotary.apply(apply_rotary_pos_emb, leaves[0], leaves[1], *_angles())
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in leaves]
