"""A GPU's rows, on a CPU, give what a CPU's do, up to rounding: whatever the losses and whoever fails."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import Datum, Failure, LoraSpec, PassItem, PassOutput
from skyrl_tinker.training import distributed
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.batching.outputs import RankOutput, assemble
from skyrl_tinker.training.models.planned_device import planning
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.losses.support.uploads import upload
from tests.training.support.passes import assert_close, gradients_of, make_data, make_item, perturb

FULL = 5
SPECS = {
    1: LoraSpec(4, 1),
    2: LoraSpec(16, 2, train_mlp=False),
    3: LoraSpec(1, 3, train_attn=False, train_unembed=False),
    4: LoraSpec(8, 4, train_unembed=False),
    FULL: LoraSpec(0, 0),
}
BUDGET = 128
LENGTHS = (60, 5, 100, 1, 40, 30, 70, 12)
"""Of each request: several rows, none of which a CPU would cut in the same places."""


def _items() -> list[PassItem]:
    """All kinds of loss: per target, candidate, datum and request, and a custom one."""
    double = upload(lambda logprobs: (2 * logprobs.square().sum(), {}), logprobs=1)
    own = make_data(LENGTHS, 6, "custom")
    return [
        make_item(1, make_data(LENGTHS, 1, "ppo"), "ppo"),
        make_item(1, make_data(LENGTHS[2:], 2, candidates=3), seq_id=1),
        make_item(2, make_data(LENGTHS, 3, "clip_cov"), "clip_cov", config={"clip_cov_ratio": 0.2}),
        make_item(3, make_data(LENGTHS[3:], 4, "gspo"), "gspo"),
        make_item(4, make_data(LENGTHS, 5), backward=False),
        PassItem(RequestId("own"), ModelKey(4), own, "custom", {}, True, 1, double),
        make_item(FULL, make_data(LENGTHS, 7)),
    ]


def _failing(model: int, seed: int) -> PassItem:
    """A request whose loss is not finite at its last datum."""
    *good, bad = make_data(LENGTHS, seed, "importance_sampling")
    inputs = dict(bad.inputs) | {"logprobs": np.full(len(bad.tokens), -1e5, np.float32)}
    data = (*good, Datum(bad.tokens, bad.target_tokens, inputs))
    return make_item(model, data, "importance_sampling", seq_id=2)


def _overflowing(model: int, seed: int) -> PassItem:
    """A request of finite losses, whose gradients overflow in the network."""
    (datum,) = make_data((30,), seed)
    return make_item(
        model,
        (Datum(datum.tokens, datum.target_tokens, {"weights": np.full(30, 3e37, np.float32)}),),
        seq_id=3,
    )


Trained = tuple[list[PassOutput | Failure], dict[str, torch.Tensor]]


def _trained(worker: Worker, device: str, items: Sequence[PassItem]) -> Trained:
    batch = build_batch(items)
    output, gradients = _rank_trained(worker, device, batch)
    return assemble(batch, [output]), gradients


def _rank_trained(
    worker: Worker, device: str, batch: TrainingInputBatch
) -> tuple[RankOutput, dict[str, torch.Tensor]]:
    for model, spec in SPECS.items():
        worker.create_model(ModelKey(model), spec)
        if model != FULL:
            perturb(worker, model)
    with planning(device):
        output = worker.run_pass(batch)
    gradients = {
        f"{model}/{name}": gradient
        for model in SPECS
        if model != FULL
        for name, gradient in gradients_of(worker, model).items()
    }
    network = worker._models[ModelKey(FULL)].network  # type: ignore[attr-defined]
    whole = {
        name: each.grad.full_tensor() for name, each in network.named_parameters() if each.grad is not None
    }
    return output, gradients | whole


def _on_rank(place: Path, rank: int, directory: str) -> tuple[RankOutput, dict[str, torch.Tensor]]:
    """In a process of its own, one of two."""
    worker = Worker(
        TrainerSpec(directory, 2, "cpu", "float32", 1, BUDGET, gradient_checkpointing=False), rank
    )
    worker.attach(distributed.join(place, rank, 2, "cpu", 60.0))
    trained = _rank_trained(worker, "cuda", build_batch(_with_failures()))
    dist.destroy_process_group()
    return trained


def _with_failures() -> list[PassItem]:
    return [_failing(1, 8), *_items(), _overflowing(2, 9), _failing(FULL, 10)]


def _assert_same(found: Trained, expected: Trained) -> None:
    for output, other in zip(found[0], expected[0], strict=True):
        assert isinstance(output, PassOutput), output
        assert isinstance(other, PassOutput), other
        assert output.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-3)
        for a, b in zip(output.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, rtol=0)
    assert all(gradient.any() for name, gradient in found[1].items() if "lora_A" not in name)
    assert_close(found[1], expected[1], 1e-4)


def test_rows_of_even_cost_give_the_same_logprobs_and_gradients(
    make_worker: MakeWorker, untied_model: str
) -> None:
    found, expected = (
        _trained(make_worker(untied_model, BUDGET), device, _items()) for device in ("cuda", "cpu")
    )
    _assert_same(found, expected)


def test_of_what_fails_nothing_is_left(make_worker: MakeWorker, untied_model: str) -> None:
    """Without it, other segments share the rows."""
    (_, *outputs), gradients = _trained(make_worker(untied_model, BUDGET), "cuda", _with_failures())
    _assert_same((outputs[:-2], gradients), _trained(make_worker(untied_model, BUDGET), "cuda", _items()))


@pytest.mark.long
def test_two_ranks_give_what_one_does(make_worker: MakeWorker, untied_model: str, tmp_path: Path) -> None:
    place = distributed.meeting_place(str(tmp_path))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(_on_rank, (place, place), (0, 1), (untied_model, untied_model)))
    outputs, (first, second) = [output for output, _ in found], [gradients for _, gradients in found]
    assert min(len(output.segments) for output in outputs) > 20
    _, *assembled, overflown, failed = assemble(build_batch(_with_failures()), outputs)
    assert isinstance(overflown, Failure)
    assert isinstance(failed, Failure)
    summed = {name: first[name] + second[name] if "lora_" in name else first[name] for name in first}
    _assert_same((assembled, summed), _trained(make_worker(untied_model, BUDGET), "cpu", _items()))


def test_on_a_gpu_rows_are_few_and_full(make_worker: MakeWorker, untied_model: str) -> None:
    worker = make_worker(untied_model, BUDGET)
    worker.create_model(ModelKey(1), SPECS[1])
    batch = build_batch([make_item(1, make_data((100, 100, 28, 28, 60, 68, 128, 1), 1))])

    def rows() -> list[tuple[int, ...]]:
        return [micro.segments for micro in worker._runner._plan(batch, frozenset({0}), BUDGET)]

    with planning("cuda"):
        assert rows() == [(6,), (0, 2), (1, 3), (4, 5), (7,)]
    assert rows() == [(0,), (1, 2), (3, 4), (5,), (6,), (7,)]
