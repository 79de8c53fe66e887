"""Tinker's sample request as vLLM's. Pure; the responses are in vllm_responses.

Two scores are beyond vLLM's own API: logprobs of given tokens, and draws, at every prompt position. `pack`
puts them into SamplingParams.extra_args; the plugin (inference.vllm.plugin.prompt_scores) reads them with
`unpack_work` and computes a float32 matrix in the prefill, which returns in vLLM's own field
`prompt_token_id_logprobs`, as scores of vLLM's newer model runner do.

Why draws are not one-token generations: those would be one request per prompt position, each with a prefill;
here a position costs one cumulative sum. And a dict of tokens, as vLLM lists logprobs, cannot hold a token
twice. The random numbers are made for all positions from the seed alone, so they do not depend on how vLLM
cuts the prefill or on the rest of the batch.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.samples import SampleRequest
from skyrl_tinker.inference.client.sample_parts import (
    Int32,
    max_tokens,
    scores_other_tokens,
    stop_strings,
    target_table,
)

SCORES_KEY = "skyrl_tinker_scores"


def body(model: str, request: SampleRequest, *, eos: Sequence[int], context: int) -> dict[str, Any]:
    """Make the JSON of POST /inference/v1/generate. UserError if the prompt leaves no room for a token."""
    params = request.params
    sampling = {
        "n": request.num_samples,
        "max_tokens": max_tokens(request, context),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        # vLLM 0.32 lists the sampled token first and cuts the list: the k-th other needs one place more.
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


# Scores of the prompt


def _prompt_scores(request: SampleRequest) -> Mapping[str, Any]:
    fields: dict[str, Any] = {}
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        fields["prompt_logprobs"] = request.topk_prompt_logprobs  # beside those of the prompt's own tokens
    if scores_other_tokens(request):
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
