"""Gradient checkpointing changes what is kept, never a number."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, LoraSpec, PassItem, PassOutput, StepItem
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.support.tiny_models import write_tiny
from tests.training.conftest import MakeWorker
from tests.training.support.passes import (
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    run_pass,
    step,
)
from tests.training.support.saves import published_weights

LORA = {1: LoraSpec(4, 1), 2: LoraSpec(16, 2, train_mlp=False), 3: LoraSpec(1, 3, train_attn=False)}
FULL = 4
FULL_SPEC = LoraSpec(0, 0)
DTYPES = ("float32", pytest.param("bfloat16", marks=pytest.mark.long))
LAYERS = 4


def _mixed() -> list[PassItem]:
    return [
        make_item(1, make_data((40, 10, 70), 1)),
        make_item(2, make_data((30, 30), 2, "ppo"), "ppo"),
        make_item(3, make_data((20,), 3)),
        make_item(1, make_data((15,), 4), backward=False),
    ]


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "gemma3", "gpt-oss"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model of four layers, some families' of more than one kind."""
    path = tmp_path_factory.mktemp(request.param)
    write_tiny(path, arch=request.param, layers=LAYERS)
    return str(path)


def _run_again(worker: Worker, layers: int) -> None:
    """Have the first so many layers of every row run again."""
    worker._runner = replace(worker._runner, recomputed=lambda tokens, rank: layers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_tenants_have_the_same_bits(make_worker: MakeWorker, directory: str, dtype: str) -> None:
    found = []
    for layers in (0, 1, LAYERS // 2, LAYERS):
        worker = make_worker(directory, 96, dtype, LORA)
        _run_again(worker, layers)
        outputs = run_pass(worker, *_mixed())
        found.append((outputs, {model: gradients_of(worker, model) for model in LORA}))
    (expected, others), *rest = found
    for outputs, gradients in rest:
        for output, other in zip(outputs, expected, strict=True):
            assert isinstance(output, PassOutput)
            assert isinstance(other, PassOutput)
            assert output.metrics == other.metrics
            for a, b in zip(output.logprobs, other.logprobs, strict=True):
                np.testing.assert_array_equal(a, b)
        for model in LORA:
            assert_equal(gradients[model], others[model])


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_parameters_have_the_same_bits(make_worker: MakeWorker, directory: str, dtype: str) -> None:
    found = []
    for layers in (0, 1, LAYERS // 2, LAYERS):
        worker = make_worker(directory, 96, dtype, {FULL: FULL_SPEC})
        _run_again(worker, layers)
        for number in range(2):
            run_one(worker, make_item(FULL, make_data((40, 30, 20), number)))
        step(worker, FULL)
        model = worker._models[ModelKey(FULL)]
        found.append([*model.local(model.moments[0]), *model._weights()])
    expected, *rest = found
    for tensors in rest:
        assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize("models", [tuple(LORA), (FULL,)])
def test_only_the_inputs_of_layers_that_run_again_are_kept(
    make_worker: MakeWorker, untied_model: str, models: tuple[int, ...]
) -> None:
    kept = []
    for layers in range(3):
        specs = {model: LORA.get(model, FULL_SPEC) for model in models}
        worker = make_worker(untied_model, 96, models=specs)
        _run_again(worker, layers)
        kept.append(_bytes_kept(worker, [make_item(model, make_data((32,), 1)) for model in models]))
    tokens, hidden = 32 * len(models), 64
    for fewer, more in itertools.pairwise(kept):
        assert fewer - more > tokens * hidden * 4 * 5  # a layer keeps far more than its input
    assert kept[2] < kept[0] / 2


def _bytes_kept(worker: Worker, items: list[PassItem]) -> int:
    """Bytes that autograd holds outside of the checkpoints, without weights."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.shape[:2] != (512, 64):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run_pass(worker, *items)
    return sum(held.values())


@pytest.fixture(scope="module")
def groups(ray_cluster: None, tied_model: str) -> Iterator[tuple[TrainerGroup, TrainerGroup]]:
    """Groups of two ranks, with and without checkpoints."""
    spec = TrainerSpec(tied_model, 2, "cpu", "float32", 1, 96, timeout_s=30.0)
    both = tuple(TrainerGroup.launch(replace(spec, gradient_checkpointing=on)) for on in (True, False))
    for group in both:
        asyncio.run(group.ready())
    yield both[0], both[1]
    for group in both:
        asyncio.run(group.shutdown())


async def _trained(group: TrainerGroup, directory: Path) -> tuple[list[PassOutput], dict[str, np.ndarray]]:
    outputs: list[PassOutput] = []
    for model, spec in (*LORA.items(), (FULL, FULL_SPEC)):
        await group.create_model(ModelKey(model), spec)
    for _ in range(2):
        items = [*_mixed(), make_item(FULL, make_data((40, 30), 5))]
        found = (await group.run_pass(group.prepare(items))).outputs
        outputs += [output for output in found if isinstance(output, PassOutput)]
        params = AdamParams(1e-2, eps=1e-3)
        steps = [StepItem(RequestId("s"), ModelKey(model), params) for model in (*LORA, FULL)]
        await group.optim_step(steps)
    probe = make_item(FULL, make_data((30,), 6), backward=False)
    (last,) = (await group.run_pass(group.prepare([probe]))).outputs
    assert isinstance(last, PassOutput)
    weights = {
        f"{model}/{name}": array
        for model in LORA
        for name, array in (await published_weights(group, model)).items()
    }
    return [*outputs, last], weights


@pytest.mark.long
async def test_two_ranks_agree(groups: tuple[TrainerGroup, TrainerGroup], tmp_path: Path) -> None:
    (outputs, weights), (expected, others) = [await _trained(group, tmp_path) for group in groups]
    assert len(outputs) == len(expected) == 2 * 5 + 1
    for output, other in zip(outputs, expected, strict=True):
        assert output.metrics == pytest.approx(other.metrics, rel=1e-5, abs=1e-3)
        for a, b in zip(output.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    for name, array in weights.items():
        np.testing.assert_allclose(array, others[name], atol=1e-5, rtol=0, err_msg=name)


def test_ranks_that_choose_differently_call_the_same_collectives(untied_model: str) -> None:
    """Each rank chooses by its own row and memory: weights are gathered in the same order either way."""
    config = (Path(untied_model) / "config.json").read_text()
    command = [sys.executable, "-m", "tests.training.support.collectives", config]
    root = Path(__file__).parents[3]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for kept, *recomputed in json.loads(result.stdout):  # of an adapter, and of full parameters
        assert recomputed == [kept, kept]
        assert len(kept) > 2  # both layers and the rest, in both directions
