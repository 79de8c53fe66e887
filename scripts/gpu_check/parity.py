"""The same training in float32 on the CPU, and on the device in either type, layers recomputed or not."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gpu_check.checks import Check
from gpu_check.forked import alone, on_ranks
from gpu_check.models import CONFIGS, make_data, make_item, spread_b, write_base
from gpu_check.rows import Row, at_least, at_most
from gpu_check.setting import Setting
from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, Failure, Float32, LoraSpec, PassItem, StepItem
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.outputs import RankOutput, assemble
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker

SPECS = {
    ModelKey(1): LoraSpec(8, 1),
    ModelKey(2): LoraSpec(16, 2, train_unembed=False),
    ModelKey(3): LoraSpec(0, 3),
}
NAMES = {ModelKey(1): "LoRA", ModelKey(2): "LoRA without head", ModelKey(3): "full"}
STEPS = 3
PARAMS = AdamParams(1e-4, eps=1e-3)
"""A tiny eps makes a step of full size out of the rounding of a gradient near 0."""
LENGTHS = (150, 1, 300, 33)
SMALL_LENGTHS = (60, 1, 200, 33)
TOKEN_BUDGET = 600
FLOAT32 = 1e-4
"""Bound in float32: of a logprob's error, and of others relative to the largest value."""
BFLOAT16_LOGPROBS = 0.1
COSINE = 0.999


@dataclass(frozen=True)
class Trained:
    """Results of one rank; by model: gradients before the steps and weights after them, end to end."""

    first: RankOutput
    last: RankOutput
    gradients: Mapping[ModelKey, Float32]
    weights: Mapping[ModelKey, Float32]


@dataclass(frozen=True)
class Outcome:
    """Results of all ranks; logprobs before and after the steps, end to end."""

    first: Float32
    last: Float32
    gradients: Mapping[ModelKey, Float32]
    weights: Mapping[ModelKey, Float32]


def checks(setting: Setting) -> list[Check]:
    names = ("tiny", "untied") if setting.small else ("tiny", "30M")
    return [Check(f"parity of {name}", partial(_parity, setting, name)) for name in names]


def _parity(setting: Setting, name: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        alone(write_base, name, directory)
        reference = _train(setting.spec(directory, "float32", TOKEN_BUDGET, device="cpu"), name, setting)
        for dtype in ("float32", "bfloat16"):
            compare = _close if dtype == "float32" else _similar
            kept, again = (
                _train(
                    setting.spec(directory, dtype, TOKEN_BUDGET, ranks=setting.ranks, recompute=recompute),
                    name,
                    setting,
                )
                for recompute in (False, True)
            )
            yield from compare(f"{name}, {setting.device} {dtype} to cpu float32", kept, reference)
            yield from compare(f"{name}, {setting.device} {dtype}, recomputed or not", again, kept)


def _close(title: str, found: Outcome, expected: Outcome) -> Iterator[Row]:
    yield at_most(f"{title}: logprobs", _error(found.first, expected.first), FLOAT32)
    yield at_most(f"{title}: logprobs after {STEPS} steps", _error(found.last, expected.last), FLOAT32)
    for what, these, those in (
        ("gradients", found.gradients, expected.gradients),
        ("weights", found.weights, expected.weights),
    ):
        for key, name in NAMES.items():
            error = _error(these[key], those[key]) / float(np.abs(those[key]).max())
            yield at_most(f"{title}: {what}, {name}", error, FLOAT32)


def _similar(title: str, found: Outcome, expected: Outcome) -> Iterator[Row]:
    yield at_most(f"{title}: logprobs", _error(found.first, expected.first), BFLOAT16_LOGPROBS)
    yield at_most(
        f"{title}: logprobs after {STEPS} steps", _error(found.last, expected.last), BFLOAT16_LOGPROBS
    )
    for key, name in NAMES.items():
        one, two = (gradients[key].astype(np.float64) for gradients in (found.gradients, expected.gradients))
        cosine = one @ two / (np.linalg.norm(one) * np.linalg.norm(two))
        yield at_least(f"{title}: cosine of gradients, {name}", float(cosine), COSINE)


def _error(found: Float32, expected: Float32) -> float:
    return float(np.abs(found - expected).max())


# Training


def _train(spec: TrainerSpec, name: str, setting: Setting) -> Outcome:
    items = _items(name, setting)
    trained: list[Trained] = on_ranks(spec.ranks, spec.device, _train_rank, spec, items)
    return Outcome(
        first=_logprobs(items, [each.first for each in trained]),
        last=_logprobs(items, [each.last for each in trained]),
        gradients=trained[0].gradients,
        weights=trained[0].weights,
    )


def _items(name: str, setting: Setting) -> list[PassItem]:
    lengths = SMALL_LENGTHS if setting.small else LENGTHS
    vocab = CONFIGS[name].vocab_size
    losses = {ModelKey(1): "cross_entropy", ModelKey(2): "cross_entropy", ModelKey(3): "importance_sampling"}
    items = [make_item(key, make_data(lengths, vocab, int(key)), loss) for key, loss in losses.items()]
    candidates = make_data(lengths[2:], vocab, 4, candidates=3)
    return [*items, *(make_item(key, candidates) for key in SPECS)]


def _logprobs(items: Sequence[PassItem], outputs: Sequence[RankOutput]) -> Float32:
    parts = []
    for output in assemble(build_batch(items), outputs):
        if isinstance(output, Failure):
            raise RuntimeError(output.message)
        parts += [logprobs.reshape(-1) for logprobs in output.logprobs]
    return np.concatenate(parts)


def _train_rank(ranks: Ranks, spec: TrainerSpec, items: list[PassItem]) -> Trained:
    worker = Worker(spec, ranks.rank)
    worker.attach(ranks)
    for key, lora in SPECS.items():
        worker.create_model(key, lora)
        spread_b(worker, key)
    batch = build_batch(items)
    first = worker.run_pass(batch)
    gradients = {
        key: _whole(model, model.reduced_gradients(ranks)[0]) for key, model in worker._models.items()
    }
    worker.zero_gradients(list(SPECS))
    for _ in range(STEPS):
        worker.run_pass(batch)
        worker.optim_step([StepItem(RequestId("s"), key, PARAMS) for key in SPECS])
    last = worker.run_pass(batch)
    weights = {key: _whole(model, model.local(Part.WEIGHT)) for key, model in worker._models.items()}
    return Trained(first, last, gradients, weights)


def _whole(model: TrainableModel, shares: list) -> Float32:  # type: ignore[type-arg]
    """Gather all tensors of which `shares` are this rank's, end to end."""
    names = model.shapes()
    wholes = [model.gather(name, model.select(name, shares)).reshape(-1) for name in names]
    return np.concatenate([whole.detach().float().cpu().numpy() for whole in wholes])
