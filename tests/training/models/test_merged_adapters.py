"""The way of a GPU through the adapted layers, on a CPU, gives what the way of a CPU does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import grouped_mm

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Datum, Failure, LoraSpec, PassItem, PassOutput
from skyrl_tinker.training.batching.batch import MicroBatch, build_batch
from skyrl_tinker.training.batching.packed_row import make_row
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory.row_profile import FakeTrainer, Training
from skyrl_tinker.training.models import expert_layers
from skyrl_tinker.training.models.lora import Factors
from skyrl_tinker.training.models.merged_adapters import Members, _Merged
from skyrl_tinker.training.models.planned_device import planning
from tests.training.conftest import MakeWorker
from tests.training.support.passes import gradients_of, make_data, make_item, run_pass

LORA = {
    1: LoraSpec(4, 1),
    2: LoraSpec(16, 2, train_mlp=False),
    3: LoraSpec(1, 3, train_attn=False),
    4: LoraSpec(8, 4, train_unembed=False),
}


def _items() -> list[PassItem]:
    """Requests of tenants with other ranks and layers, one of them with two requests."""
    return [
        make_item(1, make_data((40, 10, 70), 1)),
        make_item(2, make_data((30, 30), 2, "ppo"), "ppo"),
        make_item(1, make_data((15,), 5), seq_id=1),
        make_item(3, make_data((20,), 3)),
        make_item(4, make_data((33,), 4)),
    ]


def _trained(
    make_worker: MakeWorker, directory: str, device: str, items: list[PassItem], *, recompute: bool
) -> tuple[list[PassOutput], dict[str, torch.Tensor]]:
    worker = make_worker(directory, 512, models=LORA, gradient_checkpointing=recompute)
    with planning(device):
        found = [output for output in run_pass(worker, *items) if isinstance(output, PassOutput)]
    assert len(found) == len(items)
    gradients = {
        f"{model}/{name}": gradient
        for model in LORA
        for name, gradient in gradients_of(worker, model).items()
    }
    return found, gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tiny", [False, True], ids=["whole rows", "a row with a rest"])
def test_all_tenants_at_once_get_what_each_gets_alone(
    make_worker: MakeWorker, any_directory: str, recompute: bool, tiny: bool
) -> None:
    items = [make_item(3, make_data((3,), 1))] if tiny else _items()
    merged, gradients = _trained(make_worker, any_directory, "cuda", items, recompute=recompute)
    apart, expected = _trained(make_worker, any_directory, "cpu", items, recompute=recompute)
    for output, other in zip(merged, apart, strict=True):
        for a, b in zip(output.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)
    assert any(gradient.any() for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-4, msg=name)


def test_a_tenant_whose_gradients_overflow_fails_alone(make_worker: MakeWorker, untied_model: str) -> None:
    """Those of its neighbours in the row are not finite either: zero times infinity is not zero."""
    worker = make_worker(untied_model, models=LORA)
    (datum,) = make_data((30,), 9)
    large = Datum(datum.tokens, datum.target_tokens, {"weights": np.full(30, 3e37, np.float32)})
    with planning("cuda"):
        *good, bad = run_pass(worker, *_items(), make_item(2, (large,), seq_id=1))
    assert all(isinstance(output, PassOutput) for output in good)
    assert isinstance(bad, Failure)
    assert "overflow" in bad.message


def test_scales_are_not_rounded_to_bfloat16() -> None:
    """32 / 12 in bfloat16 is 0.2 % larger, for all tokens alike."""
    generator, rank, scale = torch.Generator().manual_seed(0), 12, 32 / 12

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    a, b, upstream = normal(rank, 64), normal(48, rank), normal(1, 500, 48).bfloat16()
    factors = Factors(a, b, a.T, b.T, torch.zeros_like(a), torch.zeros_like(b))
    members = Members(
        a.clone().requires_grad_(), (factors,), torch.full((rank,), scale), torch.ones(500, rank)
    )
    x = normal(1, 500, 64).bfloat16().requires_grad_()
    y = _Merged.apply(x, torch.zeros(48, 64).bfloat16(), None, members.anchor, members)  # type: ignore[no-untyped-call]
    y.backward(upstream)
    wide, dy = x.detach().double()[0], upstream.double()[0]
    inner = wide @ a.double().T
    for found, expected in (
        (y[0], scale * inner @ b.double().T),
        (x.grad[0], scale * dy @ b.double() @ a.double()),  # type: ignore[index]
        (factors.grad_a, scale * (dy @ b.double()).T @ wide),
        (factors.grad_b, scale * dy.T @ inner),
    ):
        slope = (found.detach().double() * expected).sum() / expected.square().sum()
        assert float(slope) == pytest.approx(1, abs=5e-4)


def test_experts_without_tokens_get_no_gradient_whatever_their_products_are(
    make_worker: MakeWorker, mixture_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group without tokens some GPUs leave the product as they found the memory."""
    plain, empty = expert_layers.grouped_mm, []

    def poisoned(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = plain(left, right, offs=offs)
        if right.ndim == 2:
            groups = offs.diff(prepend=offs.new_zeros(1)) == 0
            empty.append(bool(groups.any()))
            out = torch.where(groups[:, None, None], torch.nan, out)
        return out

    items = [make_item(4, make_data((5,), 1))]
    _, expected = _trained(make_worker, mixture_model, "cuda", items, recompute=False)
    monkeypatch.setattr(expert_layers, "grouped_mm", poisoned)
    _, found = _trained(make_worker, mixture_model, "cuda", items, recompute=False)
    assert any(empty)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=0, rtol=0, msg=name)


class _Poisoned(torch.autograd.Function):
    """A grouped product that leaves the gradients of groups without tokens as it found the memory."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right, offs)
        return grouped_mm(left, right, offs=offs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        left, right, offs = ctx.saved_tensors
        of_right = grouped_mm(left.mT, upstream[0].contiguous(), offs=offs)
        empty = offs.diff(prepend=offs.new_zeros(1)) == 0
        of_left = grouped_mm(upstream[0].contiguous(), right.mT, offs=offs)
        return of_left, torch.where(empty[:, None, None], torch.nan, of_right), None


def test_experts_trained_themselves_get_no_gradient_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8), torch.randn(4, 16, 8, requires_grad=True)
    ends, chosen = torch.tensor([2, 2, 6, 6], dtype=torch.int32), torch.tensor([True, False, True, False])
    upstream = torch.randn(6, 16)
    (expected,) = torch.autograd.grad(torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T]), weight, upstream)
    monkeypatch.setattr(
        expert_layers, "grouped_mm", lambda left, right, *, offs: _Poisoned.apply(left, right, offs)
    )
    for _ in range(2):  # a hook of the parameter itself would stay
        weight.grad = None
        expert_layers.grouped_product(x, weight, ends, chosen).backward(upstream)
        torch.testing.assert_close(weight.grad, expected)
    assert not weight._backward_hooks


def test_neighbours_with_the_same_head_are_scored_at_once(make_worker: MakeWorker, untied_model: str) -> None:
    """A CPU scores the two requests of the first model apart; the last two models have no own head."""
    worker = make_worker(untied_model)
    for model, lora in LORA.items():
        worker.create_model(ModelKey(model), lora)
    worker.create_model(ModelKey(5), LORA[4])
    batch = build_batch([*_items(), make_item(5, make_data((20,), 6))])
    row = make_row(batch, tuple(range(len(batch.shapes))), torch.device("cpu"))
    adapters = worker._runner._adapters(MicroBatch(None, True, ()), row)
    for device, calls in (("cuda", 4), ("cpu", 5)):
        with planning(device):
            logprobs = worker._base(row, adapters)
        assert len(logprobs.grad_fn.next_functions) == calls  # type: ignore[union-attr]


def test_eight_tenants_take_hardly_more_operations_than_one(ranks: Ranks, untied_model: str) -> None:
    config = json.loads((Path(untied_model) / "config.json").read_text())
    training = Training(config, "cuda", "bfloat16", LoraSpec(8, 0)).with_layers(8)
    one, eight = (FakeTrainer(replace(training, tenants=tenants), ranks).measure(1024) for tenants in (1, 8))
    assert eight.operations < 1.5 * one.operations
