"""Start-up check: trainer and samplers score the same tokens, with base and adapter in one batch.

Samplers without a trainer score the tokens that they have drawn.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skyrl_tinker.domain.ids import ModelKey, RequestId, VersionId
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.domain.values import (
    AdamParams,
    BaseModelFacts,
    Failure,
    Float32,
    LoraSpec,
    StepItem,
    WeightVersion,
)
from skyrl_tinker.engine.parity.probe import (
    largest_difference,
    probe_tokens,
    sampler_logprobs,
    trainer_logprobs,
)
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.errors import StartupError
from skyrl_tinker.system.off_loop import in_disk_thread
from skyrl_tinker.training.trainer_group import CapturedState, TrainerGroup

MODEL = ModelKey(-1)
VERSION = VersionId(0)  # the store counts from 1
REQUEST = RequestId("canary")
TOKENS = 48
LEARNING_RATE = 0.05  # large enough for one step to change the adapter's logprobs


@dataclass(frozen=True, slots=True)
class Probe:
    """Trainer's scores: `base` and `adapter` are log p(tokens[i+1] | tokens[:i+1]), [N-1] float32."""

    tokens: tuple[int, ...]  # [N]
    base: Float32
    adapter: Float32
    weights: CapturedState


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Largest difference between two ways; `adapter`: None if the samplers take no adapters, or alone."""

    base: float
    adapter: float | None = None

    def __str__(self) -> str:
        return f"base {self.base:.1e}" + ("" if self.adapter is None else f", LoRA {self.adapter:.1e}")


async def probe(trainer: TrainerGroup, facts: BaseModelFacts) -> Probe:
    """Score on the trainer; needs no sampler."""
    tokens = probe_tokens(facts, TOKENS)
    await trainer.create_model(MODEL, LoraSpec(rank=8, seed=0))
    try:
        base = await _logprobs(trainer, tokens, backward=True)  # B is still zero
        await trainer.optim_step([StepItem(REQUEST, MODEL, AdamParams(LEARNING_RATE))])
        adapter = await _logprobs(trainer, tokens)
        captured = await trainer.capture_weights({MODEL: False})
        return Probe(tokens, base, adapter, captured[MODEL])
    finally:
        await trainer.release(MODEL)


async def _logprobs(trainer: TrainerGroup, tokens: tuple[int, ...], *, backward: bool = False) -> Float32:
    (output,) = await trainer_logprobs(trainer, [MODEL], tokens, backward=backward)
    if isinstance(output, Failure):
        raise StartupError(f"the trainer could not score {len(tokens)} tokens: {output.message}")
    return output


async def compare(probed: Probe, samplers: Samplers, directory: Path) -> LogprobGap:
    """Score on the samplers and compare. `directory` is used for the adapter and removed."""
    version = WeightVersion(VERSION, "lora", str(directory))
    await in_disk_thread(shutil.rmtree, directory, ignore_errors=True)  # an engine may have died here
    sources: list[WeightVersion | None] = [None]
    try:
        if samplers.takes_adapters:
            sources.append(version)
            await probed.weights.persist(str(directory))
            await samplers.load(version)
        scored = await asyncio.gather(
            *(sampler_logprobs(samplers, source, probed.tokens) for source in sources)
        )
    finally:
        await probed.weights.drop()
        await samplers.unload(version)
        await in_disk_thread(shutil.rmtree, directory, ignore_errors=True)
    expected = (probed.base, probed.adapter)[: len(scored)]
    return LogprobGap(
        *(largest_difference(found, own) for (found, _), own in zip(scored, expected, strict=True))
    )


async def compare_own(samplers: Samplers) -> LogprobGap:
    """Draw tokens from the base model, and score them again: with a cache, and as a prompt."""
    tokens = probe_tokens(samplers.facts, TOKENS)
    prompt = tokens[: len(tokens) // 2]
    params = SamplingParams(max_tokens=len(tokens) - len(prompt), stop=())
    drawn = (await samplers.sample(None, SampleRequest(prompt, 1, params))).sequences[0]
    scored, _ = await sampler_logprobs(samplers, None, (*prompt, *drawn.tokens))
    own = np.asarray(drawn.logprobs, np.float32)
    return LogprobGap(largest_difference(scored[len(prompt) - 1 :], own))


def require_agreement(gap: LogprobGap, allowed: float, alone: str | None = None) -> None:
    """Raise StartupError with the numbers if they exceed `allowed` or are NaN.

    `alone`: name of samplers without a trainer.
    """
    if gap.base <= allowed and (gap.adapter is None or gap.adapter <= allowed):  # false for NaN
        return
    if alone is not None:
        raise StartupError(
            f"logprobs of the {alone} differ between tokens as drawn and as scored: {gap}, allowed "
            f"{allowed:.0e} (parity.gap_bound; set parity.canary = false to serve anyway)"
        )
    raise StartupError(
        f"trainer and sampler disagree on logprobs: {gap}, allowed {allowed:.0e} (parity.gap_bound); "
        "they may hold different base models, or the versions of torch, transformers and sampler may not fit "
        "each other (set parity.canary = false to serve anyway)"
    )
