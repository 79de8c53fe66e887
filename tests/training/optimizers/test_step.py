"""Rules of every optimizer: when a step is made, and what it leaves behind."""

import math
import subprocess
import sys

import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import AdamParams, DimuonParams, LoraSpec
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.worker import Worker
from tests.training.support.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    step,
    weights_of,
)

Params = AdamParams | DimuonParams
MODEL = ModelKey(1)
both = pytest.mark.parametrize("params", [AdamParams(1e-2), DimuonParams(1e-2)], ids=["adamw", "dimuon"])


def _create(worker: Worker, params: Params) -> None:
    worker.create_model(MODEL, LoraSpec(8, 3), params.family)


@both
def test_hyperparameters_are_those_of_each_step(worker: Worker, params: Params) -> None:
    """The second step's learning rate 0 must leave the weights, whatever the first one's was."""
    _create(worker, params)
    for each in (params, type(params)(learning_rate=0.0)):
        before = weights_of(worker, 1)
        run_one(worker, make_item(1, make_data((30,), 1)))
        output = step(worker, 1, each)
        assert output.metrics["learning_rate"] == each.learning_rate
    assert output.metrics["optimizer_step"] == 2.0
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


@both
def test_a_step_without_gradients_changes_nothing_and_says_so(worker: Worker, params: Params) -> None:
    _create(worker, params)
    run_one(worker, make_item(1, make_data((30,), 1)))
    step(worker, 1, params)
    before = weights_of(worker, 1)
    output = step(worker, 1, params)
    assert output.metrics["no_gradients"] == 1.0
    assert output.metrics["optimizer_step"] == 1.0
    assert output.error is None
    assert_equal(weights_of(worker, 1), before)


def test_forward_only_leaves_no_gradient(worker: Worker) -> None:
    worker.create_model(MODEL, LoraSpec(8, 3))
    output = run_one(worker, make_item(1, make_data((30,), 1), backward=False))
    assert output.metrics["loss:sum"] != 0.0
    assert step(worker, 1).metrics["no_gradients"] == 1.0


@both
def test_a_step_with_gradients_that_are_not_finite_is_refused(worker: Worker, params: Params) -> None:
    _create(worker, params)
    run_one(worker, make_item(1, make_data((30,), 1)))
    (gradients,) = worker._models[MODEL].reduced_gradients(worker._ranks)[0]
    gradients[7] = math.inf  # as a sum over ranks may become
    before = weights_of(worker, 1)
    output = step(worker, 1, params)
    assert output.error is not None
    assert "not finite" in output.error
    assert_equal(weights_of(worker, 1), before)
    assert step(worker, 1, params).metrics["no_gradients"] == 1.0
    run_one(worker, make_item(1, make_data((30,), 1)))
    assert step(worker, 1, params).metrics["optimizer_step"] == 1.0


@both
def test_a_step_of_another_optimizer_is_refused_and_clears_its_window(worker: Worker, params: Params) -> None:
    other = AdamParams(1e-2) if params.family == "dimuon" else DimuonParams(1e-2)
    _create(worker, params)
    run_one(worker, make_item(1, make_data((30,), 1)))
    before = weights_of(worker, 1)
    error = step(worker, 1, other).error
    assert error is not None
    assert f"parameters of {other.family}, expected those of {params.family}" in error
    assert_equal(weights_of(worker, 1), before)
    assert step(worker, 1, params).metrics["no_gradients"] == 1.0


@both
def test_gradients_are_clipped_by_their_global_norm(worker: Worker, params: Params) -> None:
    """Far below the limit, at it and far above: the same step as without, as with half the gradients."""
    data = make_data((30, 20), 1)
    _create(worker, params)
    run_one(worker, make_item(1, data))
    norm = step(worker, 1, params).metrics["grad_norm"]
    plain = weights_of(worker, 1)
    clipped = {}
    for key, limit in ((2, 2 * norm), (3, norm / 2)):
        worker.create_model(ModelKey(key), LoraSpec(8, 3), params.family)
        run_one(worker, make_item(key, data))
        output = step(worker, key, type(params)(learning_rate=1e-2, grad_clip_norm=limit))
        assert output.metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)  # the one before clipping
        clipped[key] = weights_of(worker, key)
    assert_equal(clipped[2], plain)
    assert_close(clipped[3], plain, 1e-5)  # neither optimizer's first step knows the gradients' scale


def test_zeroed_gradients_are_gone(worker: Worker) -> None:
    worker.create_model(MODEL, LoraSpec(8, 3))
    run_one(worker, make_item(1, make_data((30,), 1)))
    worker.zero_gradients([MODEL])
    assert step(worker, 1).metrics["no_gradients"] == 1.0


FULL = LoraSpec(0, 0)


def _state(worker: Worker) -> dict[str, torch.Tensor]:
    model = worker._models[MODEL]
    return {
        f"{part}:{name}": model.read(part, name).clone()
        for part in (Part.WEIGHT, *model.moments)
        for name in model.shapes()
    }


def _set_gradients(worker: Worker, value: float, entries: int) -> None:
    for gradient in worker._models[MODEL].reduced_gradients(worker._ranks)[0]:
        gradient.view(-1)[:entries] = value


@pytest.mark.parametrize("spec", [LoraSpec(8, 3), FULL], ids=["adapter", "full"])
@pytest.mark.parametrize(
    ("good", "bad", "gradient", "parts"),
    [
        (AdamParams(1e-2), AdamParams(1e-2), 1e25, "exp_avg_sq"),
        (AdamParams(1e-2), AdamParams(3e38), 1.0, "weight"),
        (AdamParams(1e-2), AdamParams(1e3, weight_decay=3e38), 1.0, "weight"),
        (AdamParams(1e-2), AdamParams(1e25, eps=1e-37), 1e25, "weight and exp_avg_sq"),
        (DimuonParams(1e-2), DimuonParams(1e-2), 1e25, "momentum"),
        (DimuonParams(1e-2), DimuonParams(3e38), 1.0, "weight"),
    ],
)
def test_a_step_that_would_leave_float32_is_refused_and_changes_nothing(
    worker: Worker, spec: LoraSpec, good: Params, bad: Params, gradient: float, parts: str
) -> None:
    worker.create_model(MODEL, spec, good.family)
    for number in range(2):
        run_one(worker, make_item(1, make_data((30,), number)))
        step(worker, 1, good)
    before = _state(worker)
    run_one(worker, make_item(1, make_data((30,), 3)))
    _set_gradients(worker, gradient, 8)
    output = step(worker, 1, bad)
    assert output.error is not None
    assert f"would push {parts} beyond float32" in output.error
    assert f"learning_rate {bad.learning_rate:g}" in output.error
    assert output.metrics["optimizer_step"] == 2.0
    assert_equal(_state(worker), before)
    run_one(worker, make_item(1, make_data((30,), 3)))
    assert step(worker, 1, good).metrics["optimizer_step"] == 3.0
    after = _state(worker)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in before if name.startswith("weight"))


def test_what_float32_holds_is_not_refused_whatever_the_norm_is(worker: Worker) -> None:
    """The squares of 1e19 fit, that of the norm of eight of them does not; clipped, any gradient fits."""
    worker.create_model(MODEL, LoraSpec(8, 3))
    for value, params in ((1e19, AdamParams(1e-2)), (1e30, AdamParams(1e-2, grad_clip_norm=1.0))):
        run_one(worker, make_item(1, make_data((30,), 1)))
        _set_gradients(worker, value, 8)
        assert step(worker, 1, params).error is None
    assert all(tensor.isfinite().all() for tensor in _state(worker).values())


def test_values_beyond_float32_that_were_loaded_are_named(worker: Worker) -> None:
    _create(worker, AdamParams())
    run_one(worker, make_item(1, make_data((30,), 1)))
    step(worker, 1, AdamParams(1e-2))
    name, shape = next(iter(worker._models[MODEL].shapes().items()))
    worker._models[MODEL].write(Part.EXP_AVG_SQ, name, torch.full(shape, math.inf))
    run_one(worker, make_item(1, make_data((30,), 1)))
    assert "would push exp_avg_sq beyond" in str(step(worker, 1, AdamParams(1e-2)).error)


@both
def test_ordinary_steps_look_at_the_gradients_alone(
    worker: Worker, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments are measured before the first step, and where bounds no longer show enough."""
    measured = []
    measure = LoraModel.measure_bounds
    monkeypatch.setattr(LoraModel, "measure_bounds", lambda *args: measured.append(number) or measure(*args))
    _create(worker, params)
    for number in range(5):
        run_one(worker, make_item(1, make_data((30,), number)))
        _set_gradients(worker, 1e12, 8)
        assert step(worker, 1, params).error is None
    assert measured == [0]


def test_a_norm_takes_a_fraction_of_the_memory_of_its_tensor() -> None:
    """In a process of its own, whose peak is that of the norm."""
    code = """
import resource, torch
from skyrl_tinker.training.models.trainable_model import l2_norm
torch.set_num_threads(1)
tensor = torch.full((3 << 24,), 0.5)
l2_norm(tensor[:1000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
norm = l2_norm(tensor)
assert abs(float(norm) ** 2 / (0.25 * len(tensor)) - 1) < 1e-12, norm
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (4 * len(tensor)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 0.5
