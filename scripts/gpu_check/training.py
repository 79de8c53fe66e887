"""Training of several models on one rank or several, and comparison of its results."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gpu_check.forked import on_ranks
from gpu_check.models import spread_b
from gpu_check.rows import Row, at_least, at_most
from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import (
    AdamParams,
    DimuonParams,
    Failure,
    Float32,
    LoraSpec,
    PassItem,
    StepItem,
)
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.outputs import RankOutput, assemble
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker

STEPS = 3
PARAMS = AdamParams(1e-4, eps=1e-3)
"""A tiny eps makes a step of full size out of the rounding of a gradient near 0."""
FLOAT32 = 1e-4
"""Bound in float32: of a logprob's error, and of others relative to the largest value."""
BFLOAT16_LOGPROBS, BFLOAT16_MEAN = 0.1, 0.03
COSINE = 0.999
_POISON = 1 << 28


class Tenant(NamedTuple):
    """Model, its name in the table, and how it is trained."""

    name: str
    spec: LoraSpec
    params: AdamParams | DimuonParams = PARAMS


@dataclass(frozen=True)
class Trained:
    """Results of one rank; by model: gradients before the steps and weights after them, end to end."""

    first: RankOutput
    last: RankOutput
    gradients: Mapping[ModelKey, Float32]
    weights: Mapping[ModelKey, Float32]


@dataclass(frozen=True)
class Outcome:
    """Results of all ranks: logprobs before and after the steps, end to end, and the rest by model."""

    first: Float32
    last: Float32
    gradients: Mapping[str, Float32]
    weights: Mapping[str, Float32]


class Task(NamedTuple):
    """Training of some models on one base."""

    spec: TrainerSpec
    tenants: Mapping[ModelKey, Tenant]
    items: Sequence[PassItem]


def train(task: Task) -> Outcome:
    """Run a pass of all items, STEPS steps with one more each, and another pass. Raises RuntimeError."""
    (outcome,) = train_each([task])
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return outcome


def train_each(tasks: Sequence[Task]) -> list[Outcome | str]:
    """Train one after the other, with as many ranks, on the same device; a failed one gives its error."""
    spec = tasks[0].spec
    ranks: list[list[Trained | str]] = on_ranks(spec.ranks, spec.device, _train_tasks, tasks)
    return [_outcome(task, trained) for task, trained in zip(tasks, zip(*ranks, strict=True), strict=True)]


def _outcome(task: Task, ranks: Sequence[Trained | str]) -> Outcome | str:
    trained = [rank for rank in ranks if isinstance(rank, Trained)]
    if len(trained) < len(ranks):
        return next(rank for rank in ranks if isinstance(rank, str))
    parts: list[Float32] = []
    for outputs in ([rank.first for rank in trained], [rank.last for rank in trained]):
        assembled = assemble(build_batch(task.items), outputs)
        logprobs: list[Float32] = []
        for output in assembled:
            if isinstance(output, Failure):
                return output.message
            logprobs += [each.reshape(-1) for each in output.logprobs]
        parts.append(np.concatenate(logprobs))
    first, last = parts
    names = {key: tenant.name for key, tenant in task.tenants.items()}
    return Outcome(
        first,
        last,
        {names[key]: array for key, array in trained[0].gradients.items()},
        {names[key]: array for key, array in trained[0].weights.items()},
    )


def close(title: str, found: Outcome, expected: Outcome, bound: float = FLOAT32) -> Iterator[Row]:
    """Compare results in float32."""
    yield at_most(f"{title}: logprobs", _error(found.first, expected.first), bound)
    yield at_most(f"{title}: logprobs after {STEPS} steps", _error(found.last, expected.last), bound)
    for what, these, those in (
        ("gradients", found.gradients, expected.gradients),
        ("weights", found.weights, expected.weights),
    ):
        for name in those:
            error = _error(these[name], those[name]) / float(np.abs(those[name]).max())
            yield at_most(f"{title}: {what}, {name}", error, bound)


def similar(title: str, found: Outcome, expected: Outcome, *, choices: bool = False) -> Iterator[Row]:
    """Compare results of which one is in bfloat16.

    After steps, which make more of each rounding, the mean error is compared. `choices`: before them, too, as
    tokens whose router's scores are nearly equal may go to other experts; gradients may differ tenfold.
    """
    first, last = np.abs(found.first - expected.first), np.abs(found.last - expected.last)
    if choices:
        yield at_most(f"{title}: logprobs, mean", float(first.mean()), BFLOAT16_MEAN)
    else:
        yield at_most(f"{title}: logprobs", float(first.max()), BFLOAT16_LOGPROBS)
    yield at_most(f"{title}: logprobs after {STEPS} steps, mean", float(last.mean()), BFLOAT16_MEAN)
    for name in expected.gradients:
        one, two = (gradients[name].astype(np.float64) for gradients in (found.gradients, expected.gradients))
        cosine = one @ two / (np.linalg.norm(one) * np.linalg.norm(two))
        bound = 1 - 10 * (1 - COSINE) if choices else COSINE
        yield at_least(f"{title}: cosine of gradients, {name}", float(cosine), bound)


def _error(found: Float32, expected: Float32) -> float:
    return float(np.abs(found - expected).max())


def _train_tasks(ranks: Ranks, tasks: Sequence[Task]) -> list[Trained | str]:
    results: list[Trained | str] = []
    for task in tasks:
        try:
            results.append(_train(ranks, *task))
        except Exception as error:  # of any kernel: the others are still to be checked
            traceback.print_exc()
            results.append(f"{type(error).__name__}: {error}")
    return results


def _train(
    ranks: Ranks, spec: TrainerSpec, tenants: Mapping[ModelKey, Tenant], items: Sequence[PassItem]
) -> Trained:
    worker = Worker(spec, ranks.rank)
    worker.attach(ranks)
    for key, tenant in tenants.items():
        worker.create_model(key, tenant.spec, tenant.params.family)
        spread_b(worker, key)
    batch = build_batch(items)
    _poison(ranks.device)
    first = worker.run_pass(batch)
    gradients = {
        key: _whole(model, model.reduced_gradients(ranks)[0]) for key, model in worker._models.items()
    }
    worker.zero_gradients(list(tenants))
    for _ in range(STEPS):
        worker.run_pass(batch)
        steps = [StepItem(RequestId("s"), key, tenant.params) for key, tenant in tenants.items()]
        for output in worker.optim_step(steps):
            if output.error:
                raise RuntimeError(output.error)
    last = worker.run_pass(batch)
    weights = {key: _whole(model, model.local(Part.WEIGHT)) for key, model in worker._models.items()}
    return Trained(first, last, gradients, weights)


def _poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next tensors of a GPU get: those that nothing writes are then seen."""
    if device.type == "cuda":
        small = [torch.full((1 << 16,), torch.nan, device=device) for _ in range(64)]
        large = [torch.full((_POISON // 4,), torch.nan, device=device) for _ in range(4)]
        del small, large


def _whole(model: TrainableModel, shares: list) -> Float32:  # type: ignore[type-arg]
    """Gather all tensors of which `shares` are this rank's, end to end."""
    names = model.shapes()
    wholes = [model.gather(name, model.select(name, shares)).reshape(-1) for name in names]
    return np.concatenate([whole.detach().float().cpu().numpy() for whole in wholes])
