"""Tinker's sample request as vLLM's. Pure; the responses are in vllm_responses.

Two scores are beyond vLLM's own API: logprobs of given tokens, and draws, at every prompt position. `pack`
puts them into SamplingParams.extra_args; the plugin (inference.plugin.score_extraction) reads them with
`unpack_work` and computes a float32 matrix in the prefill, which returns in vLLM's own field
`prompt_token_id_logprobs`, as scores of vLLM's newer model runner do.

Why draws are not one-token generations: those would be one request per prompt position, each with a prefill;
here a position costs one cumulative sum. And a dict of tokens, as vLLM lists logprobs, cannot hold a token
twice. The random numbers are made for all positions from the seed alone, so they do not depend on how vLLM
cuts the prefill or what shares the batch.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import randbits
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.values import SEEDS, SampleRequest, SamplingParams
from skyrl_tinker.errors import UserError
from skyrl_tinker.inference.constants import MAX_SEQUENCES

PART_TOKENS = 1 << 12
"""Most generated tokens in one answer of vLLM, unless a sequence has more: they share one priority.

For 1 << 15 it takes vLLM about half a second to build the answer.
"""
SCORES_KEY = "skyrl_tinker_scores"
Int32 = npt.NDArray[np.int32]


def split(request: SampleRequest, *, context: int, most: int = MAX_SEQUENCES) -> list[SampleRequest]:
    """Split into requests that vLLM can serve, with consecutive seeds: at `most` and where seeds wrap.

    And at PART_TOKENS: a part takes KV cache as a whole, and while vLLM builds its answer, it answers nobody
    else, not even that it is alive. The experts of the prompt come with each sequence.

    At temperature 0 all samples are the same, so one is requested. The first part alone scores the prompt,
    with one sample: vLLM would score it again for each.
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
        parts.append(replace(part, num_samples=size, params=replace(request.params, seed=seed)))
        start += size
    return parts


def remainder(
    request: SampleRequest, index: int, kept: tuple[int, ...], *, context: int
) -> SampleRequest | None:
    """Make the request for what follows the kept tokens of sample `index`; None when nothing is to follow."""
    left = max_tokens(request, context) - len(kept)
    if left < 1:
        return None
    params = replace(request.params, max_tokens=left, seed=_resumed_seed(request.params, index, len(kept)))
    return replace(without_scores(request), prompt=request.prompt + kept, num_samples=1, params=params)


def body(model: str, request: SampleRequest, *, eos: Sequence[int], context: int) -> dict[str, Any]:
    """Make the JSON of POST /inference/v1/generate. UserError when the prompt leaves no room for a token."""
    params = request.params
    sampling = {
        "n": request.num_samples,
        "max_tokens": max_tokens(request, context),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        # vLLM lists the sampled token first and cuts the list, so the k-th other needs one place more.
        "logprobs": request.topk_sample_logprobs + 1 if request.topk_sample_logprobs else 0,
        "detokenize": False,
        # Samplers that list experts do so from here on.
        "routed_experts_prompt_start": 0 if request.routed_experts else len(request.prompt),
        **_stop(params.stop, eos),
        **_prompt_scores(request),
    }
    if params.seed is not None:
        sampling["seed"] = params.seed
    return {"model": model, "token_ids": list(request.prompt), "sampling_params": sampling}


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
    """List the tokens and texts that end a sequence. vLLM's own EOS is off, so the list is complete.

    Texts are looked for among all tokens, special ones included, as tokenizers decode by default.
    """
    if stop == ():
        return {"ignore_eos": True}
    ids = [item for item in stop or () if isinstance(item, int)]
    texts = stop_strings(stop)
    fields: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": [*eos, *ids]}
    if not texts:
        return fields
    return fields | {"stop": list(texts), "detokenize": True, "skip_special_tokens": False}


def stop_strings(stop: tuple[str, ...] | tuple[int, ...] | None) -> tuple[str, ...]:
    return tuple(item for item in stop or () if isinstance(item, str))


def _seed(params: SamplingParams, index: int) -> int | None:
    return None if params.seed is None else (params.seed + index) % SEEDS


def _resumed_seed(params: SamplingParams, index: int, position: int) -> int | None:
    """Return the seed of sample `index` from its token `position` on; a resumed part draws new numbers."""
    seed = _seed(params, index)
    if seed is None or position == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEEDS


# Scores of the prompt


def scores_prompt(request: SampleRequest) -> bool:
    return request.prompt_logprobs or request.topk_prompt_logprobs > 0 or needs_plugin(request)


def lists_logprobs(request: SampleRequest) -> bool:
    """Return whether vLLM lists logprobs beside those of the sampled tokens."""
    return bool(request.prompt_logprobs or request.topk_prompt_logprobs or request.topk_sample_logprobs)


def needs_plugin(request: SampleRequest) -> bool:
    """Return whether the plugin has to score this prompt; a single token has no position to score."""
    requested = request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k > 0
    return requested and len(request.prompt) > 1


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


def _prompt_scores(request: SampleRequest) -> Mapping[str, Any]:
    fields: dict[str, Any] = {}
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        fields["prompt_logprobs"] = request.topk_prompt_logprobs  # beside those of the prompt's own tokens
    if needs_plugin(request):
        fields["extra_args"] = {SCORES_KEY: pack(request)}
        fields["skip_reading_prefix_cache"] = True  # cached positions have no logits
    return fields


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Rows [first, len(prompt) - 1) that the plugin computes; row i belongs to prompt position i + 1.

    The matrix has the columns: logprobs of the targets, logprobs of the draws, the drawn tokens.
    """

    first: int
    targets: Int32  # [len(prompt) - 1, K], -1 = nothing
    draws: int
    temperature: float
    seed: int

    @property
    def columns(self) -> int:
        return int(self.targets.shape[1]) + 2 * self.draws

    def uniforms(self) -> npt.NDArray[np.float64]:
        """Draw [len(prompt) - 1, draws] in [0, 1)."""
        return np.random.default_rng(self.seed).random((len(self.targets), self.draws))


def pack(request: SampleRequest) -> dict[str, Any]:
    """Write the plugin's work as JSON. Draws of a request without a seed get one here."""
    table = target_table(request)
    seed = request.params.seed
    return {
        "rows": len(table),
        "targets": base64.b64encode(table.astype("<i4").tobytes()).decode(),
        "draws": request.prompt_alt_tokens_k,
        "temperature": request.params.temperature,
        "seed": randbits(63) if seed is None else seed,
    }


def unpack_work(packed: dict[str, Any]) -> ScoreWork:
    table = np.frombuffer(base64.b64decode(packed["targets"]), "<i4").reshape(packed["rows"], -1)
    draws = int(packed["draws"])
    first = 0 if draws else _first_named(table)
    return ScoreWork(first, table, draws, float(packed["temperature"]), int(packed["seed"]))


def _first_named(table: Int32) -> int:
    """Return the first row that names a token: those before it need no score."""
    named = (table >= 0).any(axis=1)
    return int(named.argmax()) if named.any() else len(table)


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
