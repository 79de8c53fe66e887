"""Probe: the same tokens scored by trainer and samplers, whose logprobs must agree."""

from collections.abc import Sequence

import numpy as np

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.domain.values import BaseModelFacts, Datum, Failure, Float32, PassItem, PassOutput
from skyrl_tinker.engine.sampler.inflight_targets import SampleSource
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.training.trainer_group import TrainerGroup

BOUNDS = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference allowed, by the trainer's dtype: bfloat16 alone moves logprobs by 0.02 to 0.12."""


def allowed_gap(settings: Settings) -> float:
    return settings.parity.gap_bound or BOUNDS[settings.trainer_dtype]


def probe_tokens(facts: BaseModelFacts, count: int) -> tuple[int, ...]:
    """Return `count` tokens, at most the context length, always the same for one base model."""
    count = min(count, facts.context_length)
    return tuple(np.random.default_rng(0).integers(0, facts.vocab_size, count).tolist())


async def trainer_logprobs(
    trainer: TrainerGroup, models: Sequence[ModelKey], tokens: Sequence[int], *, backward: bool = False
) -> list[Float32 | Failure]:
    """Return log p(tokens[i+1] | tokens[:i+1]) of each model, [N-1] float32, scored in one pass.

    NaN where the logits of a model are not finite.
    """
    datum = Datum(
        np.asarray(tokens[:-1], np.int32),
        np.asarray(tokens[1:], np.int64),
        {"weights": np.ones(len(tokens) - 1, np.float32)},
    )
    items = [
        PassItem(RequestId(f"probe-{model}"), model, (datum,), "cross_entropy", {}, backward)
        for model in models
    ]
    outputs = (await trainer.run_pass(trainer.prepare(items))).outputs
    return [_logprobs(output, len(tokens) - 1) for output in outputs]


async def prove_ranks(trainer: TrainerGroup, model: ModelKey) -> None:
    """Run a trivial pass: if the ranks die in it, too, nothing else is to blame. Raises TrainerError."""
    await trainer_logprobs(trainer, [model], (0, 0))
    trainer.note_work()


def _logprobs(output: PassOutput | Failure, count: int) -> Float32 | Failure:
    if isinstance(output, PassOutput):
        return output.logprobs[0]
    if output.category == "user":  # the loss of these tokens is not finite
        return np.full(count, np.nan, np.float32)
    return output


async def sampler_logprobs(
    samplers: Samplers, source: SampleSource, tokens: tuple[int, ...]
) -> tuple[Float32, str | None]:
    """Return the samplers' logprobs, [N-1], and the version with which they scored, if they name it."""
    request = SampleRequest(tokens, 1, SamplingParams(max_tokens=1), prompt_logprobs=True)
    output = await samplers.sample(source, request)
    spans = output.sequences[0].versions
    logprobs = np.asarray((output.prompt_logprobs or ())[1:], np.float32)
    return logprobs, spans[0].version if spans else None


def largest_difference(one: Float32, other: Float32) -> float:
    """Return max |one - other|; NaN when any value is."""
    return float(np.abs(one - other).max())
