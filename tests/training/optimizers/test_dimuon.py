"""Dimuon against a naive one: float64, singular value decompositions, one matrix after the other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import DimuonParams, LoraSpec, StepItem
from skyrl_tinker.training.optimizers.dimuon import matrix_sign
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import assert_close, make_data, make_item, run_one, step, weights_of
from tests.training.support.saves import published_weights, write_weights

PARAMS = DimuonParams(0.02, beta1=0.8, grad_clip_norm=0.5)
LORA, FULL = ModelKey(1), ModelKey(2)


def _sign(matrix: Tensor) -> Tensor:
    """The polynomial on every singular value, where `matrix_sign` multiplies matrices."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm().clamp(min=1e-12)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def _sign_of(matrix: Tensor) -> Tensor:
    """Beside others, whose signs are made at once."""
    return matrix_sign(torch.stack([torch.ones_like(matrix), matrix, 7 * matrix]))[1]


def _direction(name: str, momentum: Tensor, gradient: Tensor) -> Tensor:
    if momentum.dim() == 1:
        return momentum / momentum.norm()
    if name.endswith("embed_tokens.weight"):
        seen = gradient.any(dim=1, keepdim=True)
        return torch.where(seen, momentum / momentum.norm(dim=1, keepdim=True).clamp(min=1e-12), 0.0)
    return _sign(momentum)


def _naive_step(weights: dict[str, Tensor], gradients: dict[str, Tensor], momenta: dict[str, Tensor]) -> None:
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    clip = min(1.0, PARAMS.grad_clip_norm / float(norm))
    for name, weight in weights.items():
        gradient = gradients[name].double() * clip
        momentum = momenta.get(name, torch.zeros_like(gradient))
        momenta[name] = PARAMS.beta1 * momentum + (1 - PARAMS.beta1) * gradient
        direction = _direction(name, momenta[name], gradient)
        weights[name] = (weight - PARAMS.learning_rate * direction).float()


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (16, 16), (1, 5), (5, 1)])
def test_the_sign_of_a_matrix_keeps_directions_and_brings_singular_values_near_one(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 1e-3
    found = _sign_of(matrix)
    torch.testing.assert_close(found.double(), _sign(matrix), atol=1e-4, rtol=0)
    values = torch.linalg.svdvals(found)
    assert (values > 0.5).all()
    assert (values < 1.3).all()
    torch.testing.assert_close(_sign_of(1e3 * matrix), found, atol=1e-5, rtol=0)  # whatever its size


def test_the_sign_of_a_zero_matrix_is_zero() -> None:
    assert not _sign_of(torch.zeros(4, 6)).any()


def test_three_steps_of_an_adapter_equal_the_naive_ones(worker: Worker, untied_model: str) -> None:
    worker.create_model(LORA, LoraSpec(8, 3), "dimuon")
    weights, momenta = weights_of(worker, LORA), dict[str, Tensor]()
    before = dict(weights)
    for number in range(3):
        data = make_data((30, 20), number)
        _, gradients = reference.adapter_gradients(untied_model, weights, data, reference.cross_entropy)
        _naive_step(weights, gradients, momenta)
        run_one(worker, make_item(LORA, data))
        assert step(worker, LORA, PARAMS).metrics["optimizer_step"] == number + 1
        if number == 0:  # B is zero, and with it the gradient of A
            unchanged = {
                name for name, tensor in weights_of(worker, LORA).items() if (tensor == before[name]).all()
            }
            assert unchanged == {name for name in weights if "lora_A" in name}
        assert_close(weights_of(worker, LORA), weights, 1e-5)


def _full_gradients(model: torch.nn.Module, number: int) -> dict[str, Tensor]:
    model.zero_grad()
    reference.loss_of(model, make_data((40, 30, 20), number), reference.cross_entropy).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_three_steps_of_all_parameters_equal_the_naive_ones(
    make_worker: MakeWorker, model_directory: str, tmp_path: Path
) -> None:
    """Tied and untied: norms, embeddings and heads too."""
    worker = make_worker(model_directory, token_budget=64)
    worker.create_model(FULL, LoraSpec(0, 0), "dimuon")
    plain, momenta = reference.load(model_directory), dict[str, Tensor]()
    for number in range(3):
        weights = {name: each.detach() for name, each in plain.named_parameters()}
        _naive_step(weights, _full_gradients(plain, number), momenta)
        plain.load_state_dict(weights, strict=False)
        run_one(worker, make_item(FULL, make_data((40, 30, 20), number)))
        step(worker, FULL, PARAMS)
        write_weights(worker, FULL, tmp_path / str(number))
        found = load_file(tmp_path / str(number) / "model.safetensors")
        assert_close(found, weights, 1e-5)


def test_ranks_share_the_work_of_a_full_model(untied_model: str) -> None:
    config = (Path(untied_model) / "config.json").read_text()
    command = [sys.executable, "-m", "tests.training.support.dimuon_work", config]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone, shared = json.loads(done.stdout)
    assert 0 < shared < 0.65 * alone, "the head alone is a quarter"


@pytest.mark.long
async def test_two_ranks_equal_one(ray_cluster: None, untied_model: str, tmp_path: Path) -> None:
    """Whole matrices, although each rank has only some of their rows."""
    found = []
    for ranks in (1, 2):
        group = TrainerGroup.launch(TrainerSpec(untied_model, ranks, "cpu", "float32", 1, 64, timeout_s=30.0))
        await group.ready()
        for model, spec in ((LORA, LoraSpec(8, 1)), (FULL, LoraSpec(0, 0))):
            await group.create_model(model, spec, "dimuon")
        for number in range(3):
            items = [make_item(model, make_data((40, 9, 30), number)) for model in (LORA, FULL)]
            await group.run_pass(group.prepare(items))
            await group.optim_step([StepItem(RequestId("s"), model, PARAMS) for model in (LORA, FULL)])
        weights = await published_weights(group, FULL) | await published_weights(group, LORA)
        found.append({name: torch.tensor(array) for name, array in weights.items()})
        await group.shutdown()
    assert_close(found[1], found[0], 1e-5)
