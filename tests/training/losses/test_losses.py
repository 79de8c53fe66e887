from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.training.losses import LOSS_FUNCTIONS
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    weights_of,
)

LENGTHS = (5, 64, 64, 1, 90, 17)


@pytest.mark.parametrize("loss_fn", sorted(reference.LOSSES))
def test_loss_and_gradient_equal_the_reference(
    make_worker: MakeWorker, model_directory: str, loss_fn: str
) -> None:
    worker = make_worker(model_directory, token_budget=128, models={1: LoraSpec(8, 0)})
    data = make_data(LENGTHS, 1, loss_fn)
    output = run_one(worker, make_item(1, data, loss_fn))
    loss, gradients = reference.adapter_gradients(
        model_directory, weights_of(worker, 1), data, reference.LOSSES[loss_fn]
    )
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-3)
    assert_close(gradients_of(worker, 1), gradients, 1e-5)


@pytest.mark.parametrize(("loss_fn", "naive"), [("ppo", reference.ppo), ("cispo", reference.cispo)])
def test_clip_thresholds_are_those_of_the_request(
    make_worker: MakeWorker, untied_model: str, loss_fn: str, naive: reference.Loss
) -> None:
    worker = make_worker(untied_model)
    worker.create_model(ModelKey(1), LoraSpec(8, 0))
    data = make_data(LENGTHS, 1, loss_fn)
    config = {"clip_low_threshold": 0.3, "clip_high_threshold": 0.9}
    output = run_one(worker, make_item(1, data, loss_fn, config=config))
    bounded = partial(naive, low=0.3, high=0.9)  # type: ignore[call-arg]
    loss, gradients = reference.adapter_gradients(untied_model, weights_of(worker, 1), data, bounded)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-3)
    assert_close(gradients_of(worker, 1), gradients, 1e-5)


@pytest.mark.parametrize("candidates", [0, 3])
def test_cross_entropy_without_weights_is_that_with_ones(
    make_worker: MakeWorker, untied_model: str, candidates: int
) -> None:
    worker = make_worker(untied_model)
    data = make_data(LENGTHS, 1, candidates=candidates)
    ones = tuple(
        replace(datum, inputs={"weights": np.ones(datum.target_tokens.shape, np.float32)}) for datum in data
    )
    bare = tuple(replace(datum, inputs={}) for datum in data)
    outputs, gradients = [], []
    for number, one in enumerate((ones, bare), 1):
        worker.create_model(ModelKey(number), LoraSpec(8, 0))
        outputs.append(run_one(worker, make_item(number, one)).metrics)
        gradients.append(gradients_of(worker, number))
    assert outputs[0] == outputs[1]
    assert outputs[0]["weights:sum"] == sum(datum.target_tokens.size for datum in data)
    assert_equal(gradients[1], gradients[0])


def test_every_loss_of_the_wire_is_built() -> None:
    assert LOSS_FUNCTIONS.keys() == LOSSES.keys()


@pytest.mark.parametrize("loss_fn", sorted(reference.LOSSES))
def test_metric_names_have_one_colon_and_a_known_reduction(
    make_worker: MakeWorker, untied_model: str, loss_fn: str
) -> None:
    worker = make_worker(untied_model)
    worker.create_model(ModelKey(1), LoraSpec(8, 0))
    metrics = run_one(worker, make_item(1, make_data((8,), 1, loss_fn), loss_fn)).metrics
    assert "loss:sum" in metrics
    assert {name.split(":")[1] for name in metrics} <= {"sum", "min", "max"}
    assert all(name.count(":") == 1 for name in metrics)
