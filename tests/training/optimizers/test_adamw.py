from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import AdamParams, LoraSpec
from skyrl_tinker.protocol.validation.steps import validate_step_params
from skyrl_tinker.training.optimizers import adamw
from skyrl_tinker.training.worker import Worker
from tests.training.support import reference
from tests.training.support.passes import assert_close, make_data, make_item, run_one, step, weights_of

PLAIN = AdamParams(learning_rate=1e-2)
FANCY = AdamParams(1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5)


@pytest.mark.parametrize("adam", [PLAIN, FANCY])
def test_three_steps_equal_torch_adamw(worker: Worker, untied_model: str, adam: AdamParams) -> None:
    worker.create_model(ModelKey(1), LoraSpec(8, 3))
    leaves = {name: tensor.requires_grad_() for name, tensor in weights_of(worker, 1).items()}
    betas = (adam.beta1, adam.beta2)
    optimizer = torch.optim.AdamW(leaves.values(), adam.learning_rate, betas, adam.eps, adam.weight_decay)
    for number in range(3):
        data = make_data((30, 20), number)
        _, gradients = reference.adapter_gradients(untied_model, leaves, data, reference.cross_entropy)
        for name, leaf in leaves.items():
            leaf.grad = gradients[name]
        limit = adam.grad_clip_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(leaves.values(), limit))
        optimizer.step()
        run_one(worker, make_item(1, data))
        output = step(worker, 1, adam)
        assert output.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert output.metrics["optimizer_step"] == number + 1
        assert output.metrics["learning_rate"] == adam.learning_rate
    assert_close(weights_of(worker, 1), {name: leaf.detach() for name, leaf in leaves.items()}, 1e-5)


def test_the_smallest_eps_keeps_weights_that_have_no_gradient(worker: Worker) -> None:
    """B of a new adapter is 0, so A has none; 0 / eps must stay 0."""
    params = validate_step_params({"eps": 1e-37}, None)
    worker.create_model(ModelKey(1), LoraSpec(4, 1))
    before = weights_of(worker, 1)
    run_one(worker, make_item(1, make_data((20,), 1)))
    step(worker, 1, params)
    for name, weight in weights_of(worker, 1).items():
        assert torch.equal(weight, before[name]) == ("lora_A" in name)
        assert weight.isfinite().all()


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_of_many_parameters_is_no_more_operations_than_one_of_few() -> None:
    """On a GPU, a number that is copied there for each parameter makes the host wait each time."""

    def operations(parameters: int) -> int:
        tensors = [[torch.ones(3) for _ in range(parameters)] for _ in range(4)]
        with _Operations() as found:
            adamw._update(PLAIN, 4, *tensors)
        return found.count

    assert operations(2) == operations(40)
