import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import (
    AdamParams,
    DimuonParams,
    Failure,
    LoraSpec,
    OptimizerFamily,
    PassOutput,
)
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import assert_close, make_data, make_item, run_one, run_pass, step
from tests.training.support.saves import save, write_weights

FULL = LoraSpec(0, 0)
ADAM = AdamParams(1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5)


def _exported(worker: Worker, model: int, directory: Path) -> dict[str, torch.Tensor]:
    write_weights(worker, model, directory)
    return load_file(directory / "model.safetensors")


def test_full_parameter_training_equals_plain_torch_training(
    make_worker: MakeWorker, model_directory: str, tmp_path: Path
) -> None:
    worker = make_worker(model_directory, token_budget=64)
    worker.create_model(ModelKey(1), FULL)
    plain = reference.load(model_directory)
    betas = (ADAM.beta1, ADAM.beta2)
    optimizer = torch.optim.AdamW(plain.parameters(), ADAM.learning_rate, betas, ADAM.eps, ADAM.weight_decay)
    for number in range(3):
        data = make_data((40, 30, 20), number)
        optimizer.zero_grad()
        loss = reference.loss_of(plain, data, reference.cross_entropy)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), ADAM.grad_clip_norm))
        optimizer.step()
        outputs = [run_one(worker, make_item(1, part)) for part in (data[:1], data[1:])]
        assert sum(output.metrics["loss:sum"] for output in outputs) == pytest.approx(loss.item(), rel=1e-5)
        assert step(worker, 1, ADAM).metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_close(_exported(worker, 1, tmp_path / "w"), expected, 1e-5)


def test_full_models_lora_models_and_the_base_do_not_touch_each_other(
    make_worker: MakeWorker, untied_model: str
) -> None:
    worker = make_worker(untied_model)
    for model, spec in ((1, FULL), (2, LoraSpec(8, 0)), (3, FULL)):
        worker.create_model(ModelKey(model), spec)
    data = make_data((40, 30), 1)
    before = run_one(worker, make_item(3, data, backward=False)).logprobs
    for output in run_pass(worker, make_item(2, data), make_item(1, data)):
        assert isinstance(output, PassOutput)
    step(worker, 1)
    for model in (2, 3):
        output = run_one(worker, make_item(model, data, backward=False))
        for found, expected in zip(output.logprobs, before, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    trained = run_one(worker, make_item(1, data, backward=False)).logprobs
    assert np.abs(trained[0] - before[0]).max() > 1e-2


def test_a_failing_request_leaves_a_full_models_gradients(
    make_worker: MakeWorker, untied_model: str, tmp_path: Path
) -> None:
    weights = []
    for number, with_failure in enumerate((True, False)):
        worker = make_worker(untied_model)
        worker.create_model(ModelKey(1), FULL)
        run_one(worker, make_item(1, make_data((40, 30), 1)))
        if with_failure:
            data = make_data((20,), 2, "importance_sampling")
            data[0].inputs["logprobs"][:] = -1e5
            (output,) = run_pass(worker, make_item(1, data, "importance_sampling"))
            assert isinstance(output, Failure)
        step(worker, 1)
        weights.append(_exported(worker, 1, tmp_path / str(number)))
    assert_close(weights[0], weights[1], 0.0)


def test_a_failing_request_keeps_no_second_set_of_gradients(worker: Worker) -> None:
    worker.create_model(ModelKey(1), FULL)
    run_one(worker, make_item(1, make_data((40, 30), 1)))
    parameter = next(worker._models[ModelKey(1)].network.parameters())  # type: ignore[attr-defined]
    gradient = weakref.ref(parameter.grad)
    data = make_data((20,), 2, "importance_sampling")
    data[0].inputs["logprobs"][:] = -1e5
    run_pass(worker, make_item(1, data, "importance_sampling"))
    assert gradient() is parameter.grad
    step(worker, 1)
    assert gradient() is None


def test_a_released_copy_is_gone_at_once(worker: Worker) -> None:
    """Its modules and hooks refer to each other; the next copy's memory check must not find it there."""
    worker.create_model(ModelKey(1), FULL)
    run_one(worker, make_item(1, make_data((40, 30), 1)))
    network = weakref.ref(worker._models[ModelKey(1)].network)  # type: ignore[attr-defined]
    gc.disable()
    try:
        worker.release(ModelKey(1))
        assert network() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_two_full_models_side_by_side_train_as_alone_to_the_last_bit(
    make_worker: MakeWorker, untied_model: str, tmp_path: Path, optimizer: OptimizerFamily
) -> None:
    params = ADAM if optimizer == "adamw" else DimuonParams(1e-2)
    together, *alone = (make_worker(untied_model, token_budget=64) for _ in range(3))
    for key, worker in ((1, alone[0]), (2, alone[1]), (1, together), (2, together)):
        worker.create_model(ModelKey(key), FULL, optimizer)
    for number in range(2):
        items = [make_item(key, make_data((40, 30), 10 * key + number)) for key in (1, 2)]
        outputs = run_pass(together, *items)
        for key, item, output, worker in zip((1, 2), items, outputs, alone, strict=True):
            expected = run_one(worker, item)
            assert isinstance(output, PassOutput)
            assert output.metrics == expected.metrics
            assert step(together, key, params).metrics == step(worker, key, params).metrics
    for key, worker in zip((1, 2), alone, strict=True):
        found, expected = (
            _exported(each, key, tmp_path / f"{key}{each is worker}") for each in (together, worker)
        )
        assert_close(found, expected, 0.0)


@pytest.mark.parametrize("spec", [FULL, LoraSpec(8, 0)])
def test_bfloat16_computes_near_float32_and_keeps_float32_masters(
    make_worker: MakeWorker, untied_model: str, tmp_path: Path, spec: LoraSpec
) -> None:
    worker = make_worker(untied_model, 64, "bfloat16")
    worker.create_model(ModelKey(1), spec)
    data = make_data((40, 30), 1)
    output = run_one(worker, make_item(1, data))
    expected = reference.logprobs(reference.load(untied_model), data[0]).detach().numpy()
    assert output.logprobs[0].dtype == np.float32
    assert np.abs(output.logprobs[0] - expected).max() < 0.5
    assert step(worker, 1).error is None
    save(worker, 1, tmp_path / "c")
    for file in (tmp_path / "c").glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}
