"""Router replay: datums with recorded experts compute what Hugging Face does with these experts forced."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Datum, LoraSpec, PassOutput, ReplayedExperts
from skyrl_tinker.training.worker import Worker
from tests.support.forced_experts import force_experts
from tests.support.tiny_models import write_tiny
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    run_pass,
    weights_of,
)

LORA, FULL, OTHER = 1, 2, 3
LAYERS, EXPERTS, CHOSEN = 2, 7, 2
DATA = make_data((30, 9, 41), 1)


@pytest.fixture(params=["as they are", "normalized"])
def directory(request: pytest.FixtureRequest, mixture_model: str, tmp_path: Path) -> str:
    """Two mixtures, whose weights of the chosen experts are as they are, or sum up to one."""
    if request.param == "as they are":
        return mixture_model
    write_tiny(tmp_path / "model", arch="qwen3-moe", tied=False)
    return str(tmp_path / "model")


@pytest.fixture
def trainer(make_worker: MakeWorker, directory: str) -> Worker:
    return _trainer(make_worker, directory)


def _trainer(make_worker: MakeWorker, directory: str, *, recompute: bool = False) -> Worker:
    models = {model: LoraSpec(rank, 1) for model, rank in ((LORA, 8), (FULL, 0), (OTHER, 4))}
    return make_worker(directory, models=models, gradient_checkpointing=recompute)


def _other_experts(data: tuple[Datum, ...], seed: int, *, every: int = 0) -> tuple[Datum, ...]:
    """Have random experts replayed, two different ones a token, but not for every so manieth token."""
    pairs = np.array(list(itertools.permutations(range(EXPERTS), CHOSEN)), np.uint8)
    draw = partial(np.random.default_rng(seed).choice, pairs)
    changed = []
    for datum in data:
        known = np.arange(len(datum.tokens)) % (every or len(datum.tokens) + 1) != every - 1
        changed.append(replace(datum, replayed=ReplayedExperts(draw((len(known), LAYERS)), known)))
    return tuple(changed)


def _naive(model: torch.nn.Module, data: tuple[Datum, ...], merged: Any = None) -> list[torch.Tensor]:
    """Compute the logprobs of each datum and add the gradients of their cross entropy."""
    found = []
    for datum in data:
        assert datum.replayed is not None
        force_experts(model, datum.replayed)
        logprobs = reference.logprobs(model, datum, merged)
        reference.cross_entropy(logprobs, {"weights": torch.tensor(datum.inputs["weights"])}).backward(
            retain_graph=True
        )
        found.append(logprobs.detach())
    return found


def _assert_close(output: PassOutput, expected: list[torch.Tensor]) -> None:
    for one, other in zip(output.logprobs, expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("every", [0, 3])
def test_full_parameters_compute_and_learn_with_the_replayed_experts(
    make_worker: MakeWorker, directory: str, every: int, recompute: bool
) -> None:
    trainer = _trainer(make_worker, directory, recompute=recompute)
    data = _other_experts(DATA, 1, every=every)
    own = run_one(trainer, make_item(FULL, DATA, backward=False))
    plain = reference.load(directory)
    output = run_one(trainer, make_item(FULL, data))
    assert max(np.abs(a - b).max() for a, b in zip(output.logprobs, own.logprobs, strict=True)) > 0.1
    _assert_close(output, _naive(plain, data))
    network: Any = trainer._models[ModelKey(FULL)]
    found = {name: weight.grad.full_tensor() for name, weight in network.network.causal_lm.named_parameters()}
    expected = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    assert float(expected["model.layers.1.mlp.gate.weight"].abs().max()) > 1e-3, "routers learn"
    assert_close(found, expected, 1e-5)


def test_adapters_compute_and_learn_with_the_replayed_experts(trainer: Worker, directory: str) -> None:
    data = _other_experts(DATA, 2, every=4)
    output = run_one(trainer, make_item(LORA, data))
    plain = reference.load(directory).requires_grad_(False)
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in weights_of(trainer, LORA).items()}
    _assert_close(output, _naive(plain, data, reference.merge(plain, leaves)))
    expected = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    assert_close(gradients_of(trainer, LORA), expected, 1e-5)


def test_the_routers_own_experts_and_no_record_change_no_bit(
    make_worker: MakeWorker, mixture_model: str
) -> None:
    """Also beside others' replayed experts in the same row."""
    plain = reference.load(mixture_model)
    own = [replace(datum, replayed=_own_experts(plain, datum)) for datum in DATA]
    found, expected = (_trainer(make_worker, mixture_model) for _ in range(2))
    beside = make_item(OTHER, _other_experts(DATA, 3))
    bare, recorded = make_item(FULL, DATA, seq_id=1), make_item(FULL, tuple(own), seq_id=2)
    lora = make_item(LORA, DATA)
    outputs = run_pass(found, beside, bare, recorded, lora)
    for item, output in zip((bare, bare, lora), outputs[1:], strict=True):
        assert isinstance(output, PassOutput)
        alone = run_one(expected, item)
        for one, other in zip(output.logprobs, alone.logprobs, strict=True):
            np.testing.assert_array_equal(one, other)
    assert_equal(gradients_of(found, LORA), gradients_of(expected, LORA))


def _own_experts(model: Any, datum: Datum) -> ReplayedExperts:
    """Those that the model chooses, as int16."""
    chosen: list[torch.Tensor] = []
    keep: Callable[..., None] = lambda module, args, output: chosen.append(output[2])  # noqa: E731
    hooks = [block.mlp.gate.register_forward_hook(keep) for block in model.model.layers]
    reference.logprobs(model, datum)
    for hook in hooks:
        hook.remove()
    experts = torch.stack(chosen, 1).numpy().astype(np.int16)
    return ReplayedExperts(experts, np.ones(len(experts), bool))
