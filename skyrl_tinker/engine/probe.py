"""The same tokens scored by trainer and samplers: what they say of each must agree."""

from collections.abc import Sequence

import numpy as np

from skyrl_tinker.engine.inflight import Wanted
from skyrl_tinker.engine.samplers import Samplers
from skyrl_tinker.errors import StateLostError
from skyrl_tinker.training.group import TrainerGroup
from skyrl_tinker.wire.ids import ModelKey, RequestId
from skyrl_tinker.wire.values import (
    BaseModelFacts,
    Datum,
    Failure,
    Float32,
    PassItem,
    SampleRequest,
    SamplingParams,
)

_REQUEST = RequestId("probe")


def probe_tokens(facts: BaseModelFacts, count: int) -> tuple[int, ...]:
    """[count] (at most a context of them), always the same for one base model."""
    count = min(count, facts.context_length)
    return tuple(np.random.default_rng(0).integers(0, facts.vocab_size, count).tolist())


async def trainer_logprobs(
    trainer: TrainerGroup, model: ModelKey, tokens: Sequence[int], *, backward: bool = False
) -> Float32:
    """log p(tokens[i+1] | tokens[:i+1]), [N-1] float32; NaN when the model's logits are not finite."""
    count = len(tokens) - 1
    datum = Datum(
        np.asarray(tokens[:-1], np.int32),
        np.asarray(tokens[1:], np.int64),
        {"weights": np.ones(count, np.float32)},
    )
    item = PassItem(_REQUEST, model, (datum,), "cross_entropy", {}, backward)
    (output,) = await trainer.run_pass(trainer.prepare([item]))
    if isinstance(output, Failure):
        if output.category == "user":  # the loss of these tokens is not finite
            return np.full(count, np.nan, np.float32)
        raise StateLostError(output.message)
    return output.logprobs[0]


async def sampler_logprobs(
    samplers: Samplers, wanted: Wanted, tokens: tuple[int, ...]
) -> tuple[Float32, str | None]:
    """The same, [N-1], from the samplers, and the version with which they scored, if they say so."""
    request = SampleRequest(tokens, 1, SamplingParams(max_tokens=1), prompt_logprobs=True)
    output = await samplers.sample(wanted, request)
    spans = output.sequences[0].versions
    logprobs = np.asarray((output.prompt_logprobs or ())[1:], np.float32)
    return logprobs, spans[0].version if spans else None


def largest_difference(one: Float32, other: Float32) -> float:
    """NaN when any of them is."""
    return float(np.abs(one - other).max())
