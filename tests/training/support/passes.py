"""Short ways to make requests and to run them on one in-process worker."""

from collections.abc import Mapping

import numpy as np
import torch

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import (
    AdamParams,
    Datum,
    DimuonParams,
    Failure,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.outputs import assemble
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.worker import Worker

VOCAB = 512


def make_datum(length: int, seed: int, loss_fn: str = "cross_entropy", candidates: int = 0) -> Datum:
    """Random tokens; weights and advantages of both signs and with zeros, q near -6; [length, candidates]
    targets if there are candidates."""
    rng = np.random.default_rng(seed)
    shape = (length, candidates) if candidates else (length,)
    arrays = {
        "weights": rng.integers(-1, 3, shape),
        "advantages": rng.integers(-2, 3, shape),
        "logprobs": rng.normal(-6.0, 0.5, shape),
        "sequence_ratio_mask": rng.integers(0, 2, shape),
        "sampling_logprobs": rng.normal(-6.0, 0.5, shape),
        "sampled": rng.integers(0, 2, shape),
    }
    spec = LOSSES[loss_fn]
    inputs = {
        name: arrays[name].astype(np.float32) for name in (*spec.inputs, *spec.optional, *spec.recorded)
    }
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    return Datum(tokens, rng.integers(0, VOCAB, shape).astype(np.int64), inputs)


def make_data(
    lengths: tuple[int, ...], seed: int, loss_fn: str = "cross_entropy", candidates: int = 0
) -> tuple[Datum, ...]:
    numbered = enumerate(lengths, seed * 1000)
    return tuple(make_datum(length, number, loss_fn, candidates) for number, length in numbered)


def make_item(
    model: int,
    data: tuple[Datum, ...],
    loss_fn: str = "cross_entropy",
    *,
    backward: bool = True,
    config: Mapping[str, float] | None = None,
    seq_id: int = 0,
) -> PassItem:
    return PassItem(RequestId(f"r{model}"), ModelKey(model), data, loss_fn, config or {}, backward, seq_id)


def run_pass(worker: Worker, *items: PassItem) -> list[PassOutput | Failure]:
    batch = build_batch(items)
    return assemble(batch, [worker.run_pass(batch)])


def run_one(worker: Worker, item: PassItem) -> PassOutput:
    (output,) = run_pass(worker, item)
    assert isinstance(output, PassOutput), output
    return output


def step(worker: Worker, model: int, params: AdamParams | DimuonParams | None = None) -> StepOutput:
    (output,) = worker.optim_step([StepItem(RequestId("s"), ModelKey(model), params or AdamParams(1e-2))])
    return output


def weights_of(worker: Worker, model: int) -> dict[str, torch.Tensor]:
    found = worker._model_to_read(ModelKey(model))
    return {name: found.read(Part.WEIGHT, name).clone() for name in found.shapes()}


def gradients_of(worker: Worker, model: int) -> dict[str, torch.Tensor]:
    """Copy the gradients of an adapter, by PEFT key."""
    found = worker._models[ModelKey(model)]
    gradients = found._local_gradients()
    return {name: found.select(name, gradients).clone() for name in found.shapes()}


def perturb(worker: Worker, model: int) -> None:
    """Give B random values too, so that gradients reach A."""
    found = worker._models[ModelKey(model)]
    generator = torch.Generator().manual_seed(model)
    for name, shape in found.shapes().items():
        if name.endswith("lora_B.weight"):
            found.write(Part.WEIGHT, name, torch.randn(shape, generator=generator) * 0.05)


def assert_close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    """Largest difference of each tensor, relative to its largest value (at least 1)."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        limit = tolerance * max(1.0, float(tensor.abs().max()))
        off = float((found[name] - tensor).abs().max())
        assert off <= limit, f"{name}: off by {off:.3g}, at most {limit:.3g}"


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare to the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
