"""Logprobs that a packed answer lists for each position: of its own token, then of the likeliest. Pure.

What is read is what the JSON of vLLM 0.32 says, down to ties. In JSON each logprob is an object, which takes
4 us of vLLM's API process: it answers nobody else meanwhile.
"""

from typing import Any

import numpy as np

from skyrl_tinker.domain.samples import TopkRow
from skyrl_tinker.domain.values import Float32
from skyrl_tinker.inference.client.sample_parts import Int32

VLLM_LEAST_LOGPROB = -9999.0
"""vLLM's replacement for lower logprobs and NaN."""


def of_sampled(own: Int32, k: int, likeliest: Int32, logprobs: Float32) -> tuple[TopkRow, ...]:
    """Return the k most likely; fewer if logprobs are processed and top_k or top_p left fewer.

    As many were requested as JSON would list, k + 1 with the sampled token.
    """
    tokens, values, repeated = _once(own, likeliest, logprobs)
    values[~repeated, -1] = -np.inf
    return _best(tokens, np.where(values > VLLM_LEAST_LOGPROB, values, -np.inf), k)


def of_prompt(own: Int32, k: int, likeliest: Int32, logprobs: Float32) -> tuple[TopkRow, ...]:
    tokens, values, _ = _once(own, likeliest, clamped(logprobs))
    return _best(tokens, values, k)


def clamped(logprobs: Float32) -> Float32:
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
