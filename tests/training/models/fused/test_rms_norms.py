"""RMSNorm on fake tensors and on a CPU stands for torch's kernel, which runs on CUDA only."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm as by_torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from skyrl_tinker.training.memory.dispatch_counter import DispatchCounter
from skyrl_tinker.training.models.fused.rms_norms import forward_one_plus, rms_norm
from skyrl_tinker.training.models.planned_device import planning

EPS = 1e-6


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_torch_does(dtype: torch.dtype) -> None:
    leaves = x, weight = _leaf(1, 7, 3, 32, dtype=dtype), _leaf(32, dtype=dtype)
    found, expected = rms_norm(x, weight, EPS), by_torch(x, (32,), weight, EPS)
    upstream = torch.randn(x.shape).to(dtype)
    gradients = torch.autograd.grad(found, leaves, upstream)
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for one, other in zip([found, *gradients], [expected, *expected_gradients], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_the_form_of_gemma_keeps_the_digits_of_small_weights() -> None:
    """1 + 2^-9 is 1 in bfloat16."""
    norm = Gemma3RMSNorm(64).to(torch.bfloat16)
    torch.nn.init.constant_(norm.weight, 2**-9)
    x = _leaf(1000, 64, dtype=torch.bfloat16)
    upstream = torch.randn(x.shape).bfloat16()
    leaves = [x, norm.weight]
    expected = [plain := norm(x), *torch.autograd.grad(plain, leaves, upstream)]
    with planning("cuda"):
        found = [
            fused := forward_one_plus(norm, norm.forward, x),
            *torch.autograd.grad(fused, leaves, upstream),
        ]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2)
    exact = by_torch(x.detach().double(), (64,), None, norm.eps) * (1 + 2**-9)
    bias = ((fused.detach() - exact) * exact.sign()).mean() / exact.abs().mean()
    assert float(bias) == pytest.approx(0, abs=2**-12)


def test_a_frozen_norm_keeps_its_input_and_one_number_per_token() -> None:
    with FakeTensorMode():
        x, weight = torch.zeros(5, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(64).bfloat16()
        with DispatchCounter() as counter:
            y = rms_norm(x, weight, EPS)
            kept = counter.live
            assert counter.operations == 2  # the norm, and a view of what is kept
            y.backward(torch.zeros_like(y))
    assert kept == 5 * 64 * 2 + 5 * 4  # the output, and what it keeps beside x and the weight
    assert x.grad is not None
