import numpy as np
import pytest
import torch

from skyrl_tinker.training.worker import Worker
from skyrl_tinker.wire.ids import ModelKey
from skyrl_tinker.wire.values import AdamParams, Datum, LoraSpec
from tests.training import reference
from tests.training.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    step,
    weights_of,
)

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


def test_hyperparameters_are_those_of_each_step(worker: Worker) -> None:
    """The second step's learning rate 0 must leave the weights, whatever the first one's was."""
    worker.create_model(ModelKey(1), LoraSpec(8, 3))
    for rate in (1e-2, 0.0):
        before = weights_of(worker, 1)
        run_one(worker, make_item(1, make_data((30,), 1)))
        step(worker, 1, AdamParams(rate))
    assert_equal(weights_of(worker, 1), before)


def test_gradients_of_several_passes_add_up_until_the_step(worker: Worker) -> None:
    for key in (1, 2):
        worker.create_model(ModelKey(key), LoraSpec(8, 3))
    first, second = make_data((30, 20), 1), make_data((10, 40), 2)
    run_one(worker, make_item(1, first))
    run_one(worker, make_item(1, second))
    run_one(worker, make_item(2, first + second))
    assert_close(gradients_of(worker, 1), gradients_of(worker, 2), 1e-6)
    step(worker, 1)
    assert all(not gradient.any() for gradient in gradients_of(worker, 1).values())


def test_a_step_without_gradients_changes_nothing_and_says_so(worker: Worker) -> None:
    worker.create_model(ModelKey(1), LoraSpec(8, 3))
    run_one(worker, make_item(1, make_data((30,), 1)))
    step(worker, 1)
    before = weights_of(worker, 1)
    output = step(worker, 1, AdamParams(1e-2, weight_decay=0.5))
    assert output.metrics["no_gradients"] == 1.0
    assert output.metrics["optimizer_step"] == 1.0
    assert output.error is None
    assert_equal(weights_of(worker, 1), before)


def test_forward_only_leaves_no_gradient(worker: Worker) -> None:
    worker.create_model(ModelKey(1), LoraSpec(8, 3))
    output = run_one(worker, make_item(1, make_data((30,), 1), backward=False))
    assert output.metrics["loss:sum"] != 0.0
    assert step(worker, 1).metrics["no_gradients"] == 1.0


def test_a_step_with_gradients_that_are_not_finite_is_refused(worker: Worker) -> None:
    """Each loss is finite, their gradients' sum is not."""
    worker.create_model(ModelKey(1), LoraSpec(8, 3))
    (datum,) = make_data((30,), 1)
    huge = Datum(datum.tokens, datum.target_tokens, {"weights": np.full(30, 1e37, np.float32)})
    before = weights_of(worker, 1)
    for _ in range(4):
        run_one(worker, make_item(1, (huge,)))
    output = step(worker, 1)
    assert output.error is not None
    assert "not finite" in output.error
    assert_equal(weights_of(worker, 1), before)
    assert step(worker, 1).metrics["no_gradients"] == 1.0


def test_zeroed_gradients_are_gone(worker: Worker) -> None:
    worker.create_model(ModelKey(1), LoraSpec(8, 3))
    run_one(worker, make_item(1, make_data((30,), 1)))
    worker.zero_gradients([ModelKey(1)])
    assert step(worker, 1).metrics["no_gradients"] == 1.0
