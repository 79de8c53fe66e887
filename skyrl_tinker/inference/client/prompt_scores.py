"""What vLLM has no words for: logprobs of given tokens, and draws, at every prompt position.

Both ends of the channel. The request carries what `pack` makes in SamplingParams.extra_args; the plugin
(inference.vllm_prompt_scores) computes a float32 matrix in the prefill, which comes back in vLLM's own field
`prompt_token_id_logprobs`, as it does for scores that vLLM's newer model runner computes itself.

Why not one-token generations for the draws: those would be one request per prompt position, each with a
prefill; here a position costs one cumulative sum. And a dict of tokens, as vLLM lists logprobs, cannot hold a
token twice. The random numbers are made for all positions from the seed alone, so they do not depend on how
vLLM cuts the prefill or what shares the batch.
"""

import base64
import io
from dataclasses import dataclass
from itertools import pairwise
from secrets import randbits
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.values import AltTokens, Float32, SampleRequest, TargetTokens

KEY = "skyrl_tinker_scores"
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Work:
    """What the plugin computes for rows [first, len(prompt) - 1); row i belongs to prompt position i + 1.

    Its matrix has the columns: logprobs of the targets, logprobs of the draws, the drawn tokens.
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
        """[len(prompt) - 1, draws] in [0, 1)"""
        return np.random.default_rng(self.seed).random((len(self.targets), self.draws))


@dataclass(frozen=True, slots=True)
class PromptScores:
    """`targets` in the order of TargetTokens.tokens, 0.0 where nothing was asked."""

    targets: tuple[float, ...] = ()
    draws: AltTokens | None = None


def asked(request: SampleRequest) -> bool:
    """A prompt of one token has no position to score."""
    wanted = request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k > 0
    return wanted and len(request.prompt) > 1


def pack(request: SampleRequest) -> dict[str, Any]:
    """As JSON. Draws of a request without a seed get one here."""
    table = _table(request)
    seed = request.params.seed
    return {
        "rows": len(table),
        "targets": base64.b64encode(table.astype("<i4").tobytes()).decode(),
        "draws": request.prompt_alt_tokens_k,
        "temperature": request.params.temperature,
        "seed": randbits(63) if seed is None else seed,
    }


def work_of(packed: dict[str, Any]) -> Work:
    """What `pack` made, read by the plugin."""
    table = np.frombuffer(base64.b64decode(packed["targets"]), "<i4").reshape(packed["rows"], -1)
    draws = int(packed["draws"])
    first = 0 if draws else first_named(table)
    return Work(first, table, draws, float(packed["temperature"]), int(packed["seed"]))


def first_named(table: Int32) -> int:
    """The first row that names a token: those before it need no score."""
    named = (table >= 0).any(axis=1)
    return int(named.argmax()) if named.any() else len(table)


def unpack(matrix: str, request: SampleRequest) -> PromptScores:
    """The answer: base64 of a .npy file with rows [first, len(prompt) - 1)."""
    scores: Float32 = np.load(io.BytesIO(base64.b64decode(matrix)), allow_pickle=False)
    table = _table(request)
    width, draws = table.shape[1], request.prompt_alt_tokens_k
    whole = np.zeros((len(table), width), np.float32)
    whole[len(table) - len(scores) :] = scores[:, :width]
    return PromptScores(
        _in_order(request.target_prompt_logprobs, np.where(table >= 0, whole, np.float32(0))),
        _alt_tokens(scores[:, width:], draws) if draws else None,
    )


def _alt_tokens(columns: Float32, draws: int) -> AltTokens:
    tokens = columns[:, draws:].astype(np.int64)
    return AltTokens(
        draws, tuple(map(tuple, tokens.tolist())), tuple(map(tuple, columns[:, :draws].tolist()))
    )


def _table(request: SampleRequest) -> Int32:
    """[len(prompt) - 1, K]: listed cells of CSR are moved to the left, so K is the longest row's length."""
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


def _in_order(targets: TargetTokens | None, whole: Float32) -> tuple[float, ...]:
    """[cells] in the order of targets.tokens"""
    if targets is None:
        return ()
    if targets.crow is None:
        return tuple(whole.ravel().tolist())
    lengths = [end - start for start, end in pairwise(targets.crow)]
    return tuple(value for row, length in zip(whole.tolist(), lengths, strict=True) for value in row[:length])
