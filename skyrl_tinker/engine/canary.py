"""At start: do trainer and samplers agree? The same tokens, base and adapter in one batch, in numbers."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skyrl_tinker.engine.samplers import Samplers
from skyrl_tinker.errors import StartupError
from skyrl_tinker.training.group import TrainerGroup
from skyrl_tinker.weight_sync.adapters import publish_adapter
from skyrl_tinker.wire.ids import ModelKey, RequestId, VersionId
from skyrl_tinker.wire.values import (
    AdamParams,
    AdapterWeights,
    BaseModelFacts,
    Datum,
    Failure,
    Float32,
    LoraSpec,
    PassItem,
    SampleRequest,
    SamplingParams,
    StepItem,
    WeightVersion,
)

MODEL = ModelKey(-1)
VERSION = VersionId(0)  # the store counts from 1
REQUEST = RequestId("canary")
TOKENS = 48
LEARNING_RATE = 0.05  # one step that an adapter cannot hide
TOLERANCE = 1e-3  # holds for float32; other dtypes are reported, unbounded


@dataclass(frozen=True, slots=True)
class Probe:
    """What the trainer says: `base` and `adapter` are log p(tokens[i+1] | tokens[:i+1]), [N-1] float32."""

    tokens: tuple[int, ...]  # [N]
    base: Float32
    adapter: Float32
    weights: AdapterWeights


@dataclass(frozen=True, slots=True)
class Gap:
    """Largest difference between trainer and samplers."""

    base: float
    adapter: float

    def __str__(self) -> str:
        return f"base {self.base:.1e}, LoRA {self.adapter:.1e}"


async def probe(trainer: TrainerGroup, facts: BaseModelFacts) -> Probe:
    """The trainer's half; needs no sampler."""
    tokens = _tokens(facts)
    await trainer.create_model(MODEL, LoraSpec(rank=8, seed=0))
    try:
        base = await _forward(trainer, tokens, backward=True)  # B is zero still
        await trainer.optim_step([StepItem(REQUEST, MODEL, AdamParams(LEARNING_RATE))])
        adapter = await _forward(trainer, tokens, backward=False)
        return Probe(tokens, base, adapter, await trainer.capture_adapter(MODEL))
    finally:
        await trainer.release(MODEL)


async def compare(probed: Probe, samplers: Samplers, facts: BaseModelFacts, directory: Path) -> Gap:
    """The samplers' half. `directory` is used for the adapter and removed."""
    await asyncio.to_thread(publish_adapter, probed.weights, directory, facts.directory)
    version = WeightVersion(VERSION, "lora", str(directory))
    try:
        await samplers.load(version)
        base, adapter = await asyncio.gather(
            _scored(samplers, None, probed.tokens), _scored(samplers, version, probed.tokens)
        )
    finally:
        await samplers.drop(version)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return Gap(_largest(base - probed.base), _largest(adapter - probed.adapter))


def require_agreement(gap: Gap, dtype: str) -> None:
    """StartupError with the numbers."""
    agree = gap.base <= TOLERANCE and gap.adapter <= TOLERANCE  # false for NaN
    if dtype == "float32" and not agree:
        raise StartupError(
            f"trainer and sampler disagree on logprobs: {gap}, allowed {TOLERANCE:.0e}; "
            "the versions of torch, transformers and vLLM may not fit each other "
            "(set canary = false to serve anyway)"
        )


async def _forward(trainer: TrainerGroup, tokens: Sequence[int], *, backward: bool) -> Float32:
    count = len(tokens) - 1
    datum = Datum(
        np.asarray(tokens[:-1], np.int32),
        np.asarray(tokens[1:], np.int64),
        {"weights": np.ones(count, np.float32)},
    )
    item = PassItem(REQUEST, MODEL, (datum,), "cross_entropy", {}, backward)
    (output,) = await trainer.run_pass(trainer.prepare([item]))
    if isinstance(output, Failure):
        raise StartupError(f"the trainer failed its first pass: {output.message}")
    return output.logprobs[0]


async def _scored(samplers: Samplers, version: WeightVersion | None, tokens: tuple[int, ...]) -> Float32:
    request = SampleRequest(tokens, 1, SamplingParams(max_tokens=1), prompt_logprobs=True)
    output = await samplers.sample(version, request)
    return np.asarray((output.prompt_logprobs or ())[1:], np.float32)


def _tokens(facts: BaseModelFacts) -> tuple[int, ...]:
    count = min(TOKENS, facts.context_length)
    return tuple(np.random.default_rng(0).integers(0, facts.vocab_size, count).tolist())


def _largest(difference: Float32) -> float:
    return float(np.abs(difference).max())
