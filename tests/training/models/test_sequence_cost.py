"""Costs by which rows are dealt are the operations that torch counts."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.packed_row import make_row
from skyrl_tinker.training.worker import Worker
from tests.training.support.passes import make_data, make_item

TOKENS = 50


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_a_token_costs_the_products_of_all_linear_layers(worker: Worker, full: bool, backward: bool) -> None:
    worker.create_model(ModelKey(1), LoraSpec(0, 0))
    model: Any = worker._models[ModelKey(1)]
    network = model.network if full else worker._base
    row = make_row(build_batch([make_item(1, make_data((TOKENS,), 1))]), (0,), torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        with torch.set_grad_enabled(backward):
            logprobs = network(row, whole_backward=backward)
        if backward:
            logprobs.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert network.sequence_cost(backward).per_token * TOKENS == products


def test_a_pair_of_tokens_costs_two_products_in_forward_and_five_in_backward(worker: Worker) -> None:
    """Of 4 heads of size 32 in 2 layers; half of the pairs."""
    assert worker._base.sequence_cost(False).per_pair == 2 * 4 * 32 * 2
    assert worker._base.sequence_cost(True).per_pair == 2 * 4 * 32 * (2 + 5)
