"""Gated products compute, in both ways of CUDA, what eager code does, and keep two tensors."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.activations import ACT2FN

from skyrl_tinker.training.memory.dispatch_counter import DispatchCounter
from skyrl_tinker.training.models.fused import liger
from skyrl_tinker.training.models.fused.gated_products import gated
from skyrl_tinker.training.models.planned_device import planning

ACTIVATIONS = ["silu", "gelu_pytorch_tanh", "gelu"]
SHAPE = (1, 6, 24)


@pytest.fixture(params=[True, False], ids=["liger-kernel", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "installed", lambda: request.param)


def _inputs(*, halves: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up, dy = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    if halves:
        gate, up = torch.cat([gate, up], -1).chunk(2, -1)
    return gate.requires_grad_(), up.requires_grad_(), dy


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("halves", [False, True], ids=["apart", "halves of one tensor"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients_are_those_of_eager_code(name: str, halves: bool) -> None:
    gate, up, dy = _inputs(halves=halves)
    expected = ACT2FN[name](gate) * up
    expected_gradients = torch.autograd.grad(expected, [gate, up], dy)
    with planning("cuda"):
        found = gated(ACT2FN[name], gate, up)
        gradients = torch.autograd.grad(found, [gate, up], dy)
    torch.testing.assert_close([found, *gradients], [expected, *expected_gradients], atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ACTIVATIONS[:2])
def test_gate_and_up_are_all_that_is_kept(name: str) -> None:
    gate, up, _ = _inputs()
    kept = []
    with planning("cuda"), saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        gated(ACT2FN[name], gate, up)
    assert {tensor.data_ptr() for tensor in kept} == {gate.data_ptr(), up.data_ptr()}


def test_a_cpu_runs_eager_code() -> None:
    gate, up, _ = _inputs()
    assert type(gated(ACT2FN["silu"], gate, up).grad_fn).__name__ == "MulBackward0"


@pytest.mark.parametrize(("with_liger", "spent"), [(True, 0), (False, 2)])
def test_gradients_of_liger_take_the_memory_of_what_was_kept(
    with_liger: bool, spent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "installed", lambda: with_liger)
    gate, up, dy = _inputs()
    with planning("cuda"):
        found = gated(ACT2FN["silu"], gate, up)
        with DispatchCounter() as counter:
            gradients = torch.autograd.grad(found, [gate, up], dy)
            after = counter.live
    assert after == spent * gate.nbytes
    assert (gradients[0].data_ptr() == gate.data_ptr()) is with_liger
