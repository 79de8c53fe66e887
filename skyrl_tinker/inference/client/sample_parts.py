"""Parts of a sample that a sampler can serve as one request, and the remainder of an aborted one. Pure."""

import hashlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.samples import SEEDS, SampleRequest, SamplingParams
from skyrl_tinker.domain.values import Float32
from skyrl_tinker.errors import UserError
from skyrl_tinker.inference.constants import MAX_SEQUENCES

PART_TOKENS = 1 << 12
"""Most generated tokens in one answer of a sampler, unless a sequence has more: they share one priority.

For 1 << 15 it takes a sampler about half a second to build the answer.
"""
Int32 = npt.NDArray[np.int32]


def split(request: SampleRequest, *, context: int, most: int = MAX_SEQUENCES) -> list[SampleRequest]:
    """Split into requests that a sampler can serve, with consecutive seeds: at `most` and where seeds wrap.

    Also at PART_TOKENS: a part has one priority for KV cache, and while a sampler builds its answer it
    answers nothing else, not even health checks. The experts of the prompt come with each sequence.

    At temperature 0 all samples are the same, so one is requested. Only the first part scores the prompt,
    with a single sample: the prompt would be scored again for each further one.
    """
    count = request.sequences
    listed = max_tokens(request, context) + (len(request.prompt) if request.routed_experts else 0)
    most_of_part = min(most, max(1, PART_TOKENS // listed))
    parts: list[SampleRequest] = []
    start = 0
    while start < count:
        part = request if start == 0 else without_scores(request)
        fit = 1 if scores_prompt(part) else most_of_part
        seed = _seed(request.params, start)
        size = min(count - start, fit, SEEDS if seed is None else SEEDS - seed)
        if size == request.num_samples:  # as nearly always
            return [request]
        parts.append(replace(part, num_samples=size, params=replace(request.params, seed=seed)))
        start += size
    return parts


def remainder(
    request: SampleRequest, index: int, kept: tuple[int, ...], *, context: int
) -> SampleRequest | None:
    """Make the request for the tokens after the kept ones of sample `index`; None if it is complete."""
    left = max_tokens(request, context) - len(kept)
    if left < 1:
        return None
    params = replace(request.params, max_tokens=left, seed=_resumed_seed(request.params, index, len(kept)))
    return replace(without_scores(request), prompt=request.prompt + kept, num_samples=1, params=params)


def max_tokens(request: SampleRequest, context: int) -> int:
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    left = context - len(request.prompt)
    if left < 1:
        raise UserError(
            f"{len(request.prompt)} prompt tokens leave nothing of a context of {context} to sample"
        )
    return left


def stop_strings(stop: tuple[str, ...] | tuple[int, ...] | None) -> tuple[str, ...]:
    return tuple(item for item in stop or () if isinstance(item, str))


def _seed(params: SamplingParams, index: int) -> int | None:
    return None if params.seed is None else (params.seed + index) % SEEDS


def _resumed_seed(params: SamplingParams, index: int, position: int) -> int | None:
    """Return the seed of sample `index` from its token `position` on; resumed parts draw new numbers."""
    seed = _seed(params, index)
    if seed is None or position == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEEDS


# Scores of the prompt


def scores_prompt(request: SampleRequest) -> bool:
    return request.prompt_logprobs or request.topk_prompt_logprobs > 0 or scores_other_tokens(request)


def scores_other_tokens(request: SampleRequest) -> bool:
    """Return whether given tokens or draws are scored; a single token has no position to score."""
    requested = request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k > 0
    return requested and len(request.prompt) > 1


def first_scored(request: SampleRequest) -> int:
    """Return the first prompt position whose score was requested."""
    last_n = request.prompt_logprobs_last_n
    return 1 if last_n is None else max(1, len(request.prompt) - last_n)


def without_scores(request: SampleRequest) -> SampleRequest:
    """Return the request for the same samples, without scores of the prompt."""
    return replace(
        request,
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        target_prompt_logprobs=None,
        prompt_alt_tokens_k=0,
        prompt_logprobs_last_n=None,
    )


def target_table(request: SampleRequest) -> Int32:
    """Tabulate targets as [len(prompt) - 1, K], cells of CSR moved left: K is the longest row's length."""
    rows, targets = len(request.prompt) - 1, request.target_prompt_logprobs
    if targets is None:
        return np.empty((rows, 0), np.int32)
    tokens = np.asarray(targets.tokens, np.int32)
    if targets.crow is None:
        return tokens.reshape(targets.shape)
    crow = np.asarray(targets.crow)
    lengths = np.diff(crow)
    table = np.full((rows, int(lengths.max(initial=0))), -1, np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = tokens
    return table


def target_scores(request: SampleRequest, whole: Float32) -> tuple[float, ...]:
    """Return the scores of target_table's cells in the order of TargetTokens.tokens, 0 for none."""
    targets = request.target_prompt_logprobs
    if targets is None:
        return ()
    scores = np.where(target_table(request) >= 0, whole, np.float32(0))
    if targets.crow is None:
        return tuple(scores.ravel().tolist())
    lengths = [end - start for start, end in pairwise(targets.crow)]
    return tuple(
        value for row, length in zip(scores.tolist(), lengths, strict=True) for value in row[:length]
    )
