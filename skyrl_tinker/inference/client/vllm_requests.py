"""Tinker's sample request as vLLM's. Pure; the answers are in inference.answers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyrl_tinker.domain.values import SampleRequest, SamplingParams
from skyrl_tinker.errors import UserError
from skyrl_tinker.inference.client import prompt_scores
from skyrl_tinker.inference.constants import MAX_SEQUENCES

SEEDS = 1 << 63
"""Seeds are taken modulo this."""


def split(request: SampleRequest) -> list[SampleRequest]:
    """Requests that vLLM can serve, with consecutive seeds: cut at MAX_SEQUENCES and where seed + i wraps.

    At temperature 0 all samples are the same, so one is asked for. The first part alone scores the prompt,
    with one sample: vLLM would score it anew for each.
    """
    count = 1 if request.params.temperature == 0 else request.num_samples
    parts: list[SampleRequest] = []
    start = 0
    while start < count:
        part = request if start == 0 else without_scores(request)
        most = 1 if scores_prompt(part) else MAX_SEQUENCES
        seed = _seed(request.params, start)
        size = min(count - start, most, SEEDS if seed is None else SEEDS - seed)
        parts.append(replace(part, num_samples=size, params=replace(request.params, seed=seed)))
        start += size
    return parts


def scores_prompt(request: SampleRequest) -> bool:
    return request.prompt_logprobs or request.topk_prompt_logprobs > 0 or prompt_scores.asked(request)


def without_scores(request: SampleRequest) -> SampleRequest:
    """The same samples, with nothing of the prompt."""
    return replace(
        request,
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        target_prompt_logprobs=None,
        prompt_alt_tokens_k=0,
        prompt_logprobs_last_n=None,
    )


def body(model: str, request: SampleRequest, *, eos: Sequence[int], context: int) -> dict[str, Any]:
    """JSON of POST /inference/v1/generate. UserError when the prompt leaves no room for a token."""
    params = request.params
    sampling = {
        "n": request.num_samples,
        "max_tokens": max_tokens(request, context),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "logprobs": _sample_width(request.topk_sample_logprobs),
        "detokenize": False,
        **_stop(params.stop, eos),
        **_prompt_scores(request),
    }
    if params.seed is not None:
        sampling["seed"] = params.seed
    return {"model": model, "token_ids": list(request.prompt), "sampling_params": sampling}


def _sample_width(topk: int) -> int:
    """0: the sampled token alone. vLLM lists it first and cuts the list, so the k-th needs one place more."""
    return topk + 1 if topk else 0


def _prompt_scores(request: SampleRequest) -> Mapping[str, Any]:
    fields: dict[str, Any] = {}
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        fields["prompt_logprobs"] = request.topk_prompt_logprobs  # beside those of the prompt's own tokens
    if prompt_scores.asked(request):
        fields["extra_args"] = {prompt_scores.KEY: prompt_scores.pack(request)}
        fields["skip_reading_prefix_cache"] = True  # cached positions have no logits
    return fields


def max_tokens(request: SampleRequest, context: int) -> int:
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    left = context - len(request.prompt)
    if left < 1:
        raise UserError(
            f"{len(request.prompt)} prompt tokens leave nothing of a context of {context} to sample"
        )
    return left


def _stop(stop: tuple[str, ...] | tuple[int, ...] | None, eos: Sequence[int]) -> dict[str, Any]:
    """vLLM's own idea of EOS is off: which tokens end a sequence is said here alone."""
    if stop == ():
        return {"ignore_eos": True}
    ids = [item for item in stop or () if isinstance(item, int)]
    texts = stop_strings(stop)
    fields: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": [*eos, *ids]}
    return fields | {"stop": list(texts), "detokenize": True} if texts else fields


def stop_strings(stop: tuple[str, ...] | tuple[int, ...] | None) -> tuple[str, ...]:
    return tuple(item for item in stop or () if isinstance(item, str))


def _seed(params: SamplingParams, index: int) -> int | None:
    return None if params.seed is None else (params.seed + index) % SEEDS


def seed_of(params: SamplingParams, index: int, done: int) -> int | None:
    """Of sample `index` from its token `done` on; a sequence that goes on under other weights draws anew."""
    seed = _seed(params, index)
    if seed is None or done == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{done}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEEDS
