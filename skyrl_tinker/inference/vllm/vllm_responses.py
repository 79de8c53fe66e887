"""vLLM's responses as Tinker's. Pure; the requests are in vllm_requests.

A packed answer lists logprobs for each position as arrays: of its own token, then of the likeliest. What is
read is what the JSON of vLLM 0.32 says, down to ties. In JSON each logprob is an object, which takes 4 us of
vLLM's API process: it answers nobody else meanwhile.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.samples import AltTokens, SampleRequest, TopkRow
from skyrl_tinker.domain.values import Float32, RoutedExperts
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.generated import (
    GeneratedSequence,
    PromptScores,
    SamplerResponse,
    diverged,
    most_likely,
    version_spans,
)
from skyrl_tinker.inference.client.sample_parts import (
    Int32,
    first_scored,
    scores_other_tokens,
    target_scores,
    target_table,
)
from skyrl_tinker.inference.constants import BASE_MODEL

TRIAL = {
    "model": BASE_MODEL,
    "token_ids": [0, 0],  # of one token, vLLM's ExampleConnector dies
    "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 2},
}
"""Body of a request whose answer shows the server's arguments."""
Rows = Sequence[Mapping[str, Any] | None]
Listed = Mapping[str, Any]
"""Arrays of a packed answer."""
VLLM_LEAST_LOGPROB = -9999.0
"""vLLM's replacement for lower logprobs and NaN."""


def parse(
    payload: Mapping[str, Any], request: SampleRequest, *, switched: bool = False, replica: str | None = None
) -> SamplerResponse:
    """Parse vLLM's JSON.

    Raises SamplerError if a prompt was not scored although nothing was aborted, UserError for weights that
    give no finite numbers.
    """
    choices = sorted(payload["choices"], key=lambda choice: int(choice["index"]))
    details = payload["usage"].get("prompt_tokens_details") or {}
    rows, matrix = payload.get("prompt_logprobs"), payload.get("prompt_token_id_logprobs")
    listed = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
    missing = (listed and (rows is None or _positions(rows) < len(request.prompt))) or (
        scores_other_tokens(request) and matrix is None
    )
    response = SamplerResponse(
        tuple(_generated(choice, payload.get("model"), request) for choice in choices),
        details.get("cached_tokens") or 0,
        not missing,
        switched,
        replica,
    )
    if missing and all(sequence.finish != "abort" for sequence in response.sequences):
        raise SamplerError(
            "the sampler left the prompt unscored: does it run with skyrl-tinker's vLLM plugin "
            "(SKYRL_TINKER_VLLM=1)?"
        )
    if missing or (not listed and matrix is None):
        return response
    if listed and (found := _positions(rows or ())) > len(request.prompt):
        raise SamplerError(f"found logprobs of {found} of {len(request.prompt)} tokens of the prompt")
    if isinstance(rows, Mapping) and np.isnan(rows["logprobs"]).any():
        raise diverged()
    return replace(
        response,
        prompt_logprobs=_prompt_logprobs(rows or (), request) if request.prompt_logprobs else None,
        topk_prompt_logprobs=_topk_prompt(rows or (), request) if request.topk_prompt_logprobs else None,
        scores=_prompt_scores(matrix, request) if matrix is not None else None,
    )


def _generated(choice: Mapping[str, Any], model: str | None, request: SampleRequest) -> GeneratedSequence:
    k = request.topk_sample_logprobs
    listed = choice["logprobs"] or {}
    if "likeliest" in listed:
        tokens = tuple(choice["token_ids"].tolist())
        logprobs = tuple(listed["logprobs"][:, 0].tolist())
        topk = _listed_of_sampled(choice["token_ids"], k, **listed) if k else ()
    else:
        tokens = tuple(choice["token_ids"] or ())
        content = listed.get("content") or ()
        logprobs = tuple(float(position["logprob"]) for position in content)
        topk = tuple(_topk_sampled(position, k) for position in content) if k else ()
    if not all(logprob > VLLM_LEAST_LOGPROB for logprob in logprobs):  # too unlikely to be drawn
        raise diverged()
    return GeneratedSequence(
        tokens,
        logprobs,
        choice["finish_reason"],
        topk,
        version_spans(choice, model, len(tokens)),
        _experts(choice, len(request.prompt) + len(tokens) - 1)
        if request.routed_experts and tokens
        else None,
    )


def _experts(choice: Mapping[str, Any], length: int) -> RoutedExperts:
    """Read experts. Raises SamplerError unless they are those of `length` tokens."""
    encoded = choice.get("routed_experts")
    experts: RoutedExperts = np.empty(0, np.uint8) if encoded is None else _array(encoded)
    if len(experts) != length:
        raise SamplerError(
            f"the sampler returned the experts of {len(experts)} tokens, expected {length}: does it run with "
            "--enable-return-routed-experts and skyrl-tinker's vLLM plugin?"
        )
    return experts if experts.dtype == np.uint8 else experts.astype(np.int16)


def _array(encoded: str | npt.NDArray[Any]) -> Any:
    """Return an array: as it is in a packed answer, base64 of a .npy file in JSON."""
    if isinstance(encoded, np.ndarray):
        return encoded
    return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)


def _topk_sampled(position: Mapping[str, Any], k: int) -> TopkRow:
    """Return the k most likely; fewer if logprobs are processed and top_k or top_p left fewer."""
    listed = ((int(entry["token_id"]), float(entry["logprob"])) for entry in position["top_logprobs"])
    return most_likely((candidate for candidate in listed if candidate[1] > VLLM_LEAST_LOGPROB), k)


def _positions(rows: Rows | Listed) -> int:
    """Count the positions that were scored, and the first, which has no row in arrays."""
    return len(rows["logprobs"]) + 1 if isinstance(rows, Mapping) else len(rows)


def _prompt_logprobs(rows: Rows | Listed, request: SampleRequest) -> tuple[float, ...]:
    """Return [len(prompt)]; NaN for the first, which has no predecessor, and for tokens before the last n."""
    first = first_scored(request)
    if isinstance(rows, Mapping):
        return (*[math.nan] * first, *_clamped(rows["logprobs"][first - 1 :, 0]).tolist())
    return tuple(
        float(row[str(token)]["logprob"]) if row is not None and index >= first else math.nan
        for index, (row, token) in enumerate(zip(rows, request.prompt, strict=True))
    )


def _topk_prompt(rows: Rows | Listed, request: SampleRequest) -> tuple[TopkRow, ...]:
    """Return [len(prompt)]; vLLM also lists the prompt's own token, where it is not among the k best."""
    first, k = first_scored(request), request.topk_prompt_logprobs
    if isinstance(rows, Mapping):
        scored = {name: array[first - 1 :] for name, array in rows.items()}
        return (*[()] * first, *_listed_of_prompt(np.asarray(request.prompt[first:]), k, **scored))
    return tuple(
        most_likely(((int(token), float(entry["logprob"])) for token, entry in row.items()), k)
        if row is not None and index >= first
        else ()
        for index, row in enumerate(rows)
    )


def _listed_of_sampled(own: Int32, k: int, likeliest: Int32, logprobs: Float32) -> tuple[TopkRow, ...]:
    """Return the k most likely; fewer if logprobs are processed and top_k or top_p left fewer.

    As many were requested as JSON would list, k + 1 with the sampled token.
    """
    tokens, values, repeated = _once(own, likeliest, logprobs)
    values[~repeated, -1] = -np.inf
    return _best(tokens, np.where(values > VLLM_LEAST_LOGPROB, values, -np.inf), k)


def _listed_of_prompt(own: Int32, k: int, likeliest: Int32, logprobs: Float32) -> tuple[TopkRow, ...]:
    tokens, values, _ = _once(own, likeliest, _clamped(logprobs))
    return _best(tokens, values, k)


def _clamped(logprobs: Float32) -> Float32:
    """Return a prompt's logprobs with vLLM's replacement for those of zero probability."""
    return np.where(np.isneginf(logprobs), np.float32(VLLM_LEAST_LOGPROB), logprobs)


def _once(own: Int32, likeliest: Int32, logprobs: Float32) -> tuple[Int32, Float32, Any]:
    """Return tokens, their logprobs, and the rows whose own token is among the likeliest: once, that is."""
    tokens, values = np.column_stack([own, likeliest]), logprobs.copy()
    repeated = (likeliest == own[:, None]).any(1)
    values[repeated, 0] = -np.inf
    return tokens, values, repeated


def _best(tokens: Int32, logprobs: Float32, k: int) -> tuple[TopkRow, ...]:
    """Return the k most likely (token, logprob) of each row, as most_likely does; those of -inf are none."""
    order = np.lexsort((tokens, -logprobs))[:, :k]
    values = np.take_along_axis(logprobs, order, 1)
    counts = np.isfinite(values).sum(1).tolist()
    rows = zip(np.take_along_axis(tokens, order, 1).tolist(), values.tolist(), counts, strict=True)
    return tuple(tuple(zip(row[:count], best[:count], strict=True)) for row, best, count in rows)


def _prompt_scores(matrix: str | npt.NDArray[Any], request: SampleRequest) -> PromptScores:
    """Read the plugin's matrix, with rows [first, len(prompt) - 1)."""
    scores: Float32 = _array(matrix)
    table = target_table(request)
    width, draws = table.shape[1], request.prompt_alt_tokens_k
    whole = np.zeros((len(table), width), np.float32)
    whole[len(table) - len(scores) :] = scores[:, :width]
    return PromptScores(
        target_scores(request, whole), _alt_tokens(scores[:, width:], draws) if draws else None
    )


def _alt_tokens(columns: Float32, draws: int) -> AltTokens:
    logprobs, tokens = columns[:, :draws].tolist(), columns[:, draws:].astype(np.int64).tolist()
    return AltTokens(draws, tuple(map(tuple, tokens)), tuple(map(tuple, logprobs)))


def logprobs_mode(payload: Mapping[str, Any]) -> Literal["raw", "processed"] | None:
    """Find --logprobs-mode from the answer to TRIAL.

    top_k excludes the second token, which only processed logprobs show. None if the weights give no finite
    numbers.
    """
    (position,) = payload["choices"][0]["logprobs"]["content"]
    if not position["logprob"] > VLLM_LEAST_LOGPROB:
        return None
    least = min(entry["logprob"] for entry in position["top_logprobs"])
    return "processed" if least <= VLLM_LEAST_LOGPROB else "raw"


def lists_experts(payload: Mapping[str, Any]) -> bool:
    """Find --enable-return-routed-experts from the answer to TRIAL."""
    return payload["choices"][0].get("routed_experts") is not None


def with_both_reasonings(answer: dict[str, Any]) -> dict[str, Any]:
    """Add the reasoning of an OpenAI answer under the other name by which clients read it."""
    for choice in answer.get("choices", ()):
        said = choice.get("message") or choice.get("delta") or {}
        if said.get("reasoning") is not None:
            said["reasoning_content"] = said["reasoning"]
    return answer
