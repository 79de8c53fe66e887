"""asample: refused at once with HTTP 400, because a failed future would reach the user later."""

from collections.abc import Sequence

from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.schemas.sampling import AsampleRequest, ModelInput, WireSamplingParams, overflow
from skyrl_tinker.protocol.validation.limits import Limits, check_ids
from skyrl_tinker.protocol.validation.scores import (
    check_sampled_cells,
    check_scores,
    read_targets,
    scores_prompt,
)

MAX_SAMPLES = 4096
"""Most samples of one request: each is a sequence of its own on the sampler."""


def validate_sample(request: AsampleRequest, limits: Limits) -> SampleRequest:
    """Return the checked request. `max_tokens` absent stays None: the sampler fills the remaining context.

    Raises UserError, or NotSupportedError for features that are not implemented yet.
    """
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise UserError(f"num_samples is {request.num_samples}, expected 1 to {MAX_SAMPLES}")
    _refuse_other_weights(request)
    prompt = _prompt(request.prompt, limits.vocab_size)
    params = _params(request.sampling_params, limits.vocab_size)
    check_scores(request, len(prompt), limits)
    targets = request.target_prompt_logprobs
    sample = SampleRequest(
        prompt=prompt,
        num_samples=request.num_samples,
        params=params,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else read_targets(targets, len(prompt), limits),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        record_stability_info=request.record_stability_info,
    )
    check_abilities(sample, limits.sampler, limits.context_length)
    _check_length(sample, limits)
    return sample


def _refuse_other_weights(request: AsampleRequest) -> None:
    for field, given in (("base_model", request.base_model), ("model_path", request.model_path)):
        if given is not None:
            raise UserError(f"{field} is {shorten(given)}, expected none: the sampling session has its own")


def _prompt(prompt: ModelInput, vocab_size: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for index, chunk in enumerate(prompt.chunks):
        tokens.extend(chunk.text(f"prompt chunk {index}"))
    if not tokens:
        raise UserError("prompt is empty, expected at least one token")
    check_ids(tokens, "prompt", vocab_size)
    return tuple(tokens)


def _params(params: WireSamplingParams, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=_stop(params.stop, vocab_size),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
    )


def check_abilities(request: SampleRequest, sampler: SamplerAbilities, context: int) -> None:
    """Raise UserError for requests that the sampling engine would not run as asked."""
    params = request.params
    if refusal := sampler.refusal(params.temperature, params.stop or ()):
        raise UserError(f"sampling_params.{refusal}")
    _check_target_scores(request, sampler, context)
    asked = {"seed": params.seed is not None, "prompt_alt_tokens_k": request.prompt_alt_tokens_k > 0}
    sampler.require(name for name, given in asked.items() if given)


def _check_target_scores(request: SampleRequest, sampler: SamplerAbilities, context: int) -> None:
    targets, most = request.target_prompt_logprobs, sampler.most_target_scores
    if targets is None or most is None:
        return
    generated, count = request.params.max_tokens, len(targets.distinct)
    positions = context if generated is None else len(request.prompt) + generated
    if positions * count > most:
        raise UserError(
            f"target_prompt_logprobs: {positions} tokens of prompt and answer x {count} different targets = "
            f"{positions * count}, expected at most {most} for this base model's sampling engine, "
            f"{sampler.engine}"
        )


def stop_bytes(stop: str | Sequence[str | int] | None) -> int:
    """Return the bytes of the stop strings in UTF-8; token ids count nothing."""
    strings = [stop] if isinstance(stop, str) else stop or []
    return sum(len(each.encode(errors="replace")) for each in strings if isinstance(each, str))


def _stop(
    stop: str | list[str] | list[int] | None, vocab_size: int
) -> tuple[str, ...] | tuple[int, ...] | None:
    """Return stop strings or ids; [] stays empty: never stop."""
    if stop is None:
        return None
    if isinstance(stop, str):
        return (stop,)
    if strings := tuple(item for item in stop if isinstance(item, str)):
        return strings
    ids = tuple(item for item in stop if isinstance(item, int))
    check_ids(ids, "stop", vocab_size)
    return ids


def _check_length(sample: SampleRequest, limits: Limits) -> None:
    """Check the context length. Scoring needs one token that is never returned, so a full context fits."""
    context, length, max_tokens = limits.context_length, len(sample.prompt), sample.params.max_tokens
    generated = 1 if max_tokens is None else max_tokens
    spare = 1 if scores_prompt(sample) and max_tokens == 1 else 0
    if length + generated > context + spare:
        raise UserError(overflow(length, generated, context, limits.base_model))
    if sample.topk_sample_logprobs:
        check_sampled_cells(sample, context - length if max_tokens is None else generated)
