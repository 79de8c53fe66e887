"""Scores that an asample may request: those of the prompt, and the likeliest tokens."""

import numpy as np

from skyrl_tinker.domain.samples import SampleRequest, TargetTokens
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf.tensors import rows_of
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.schemas.sampling import AsampleRequest, TensorJson
from skyrl_tinker.protocol.validation.limits import Limits, check_ids

MAX_WIDTH = 1024
"""Most tokens or draws per position."""
MAX_CELLS = 1 << 20
"""Most tokens or draws of one request, over all its positions."""
MAX_LISTED = 1 << 18
"""Most tokens of topk_prompt_logprobs, which a sampler sends all at once, some as text."""
_TARGETS = "target_prompt_logprobs"


def scores_prompt(sample: SampleRequest) -> bool:
    """Return whether the request is useful without the tokens that it generates."""
    return (
        sample.prompt_logprobs
        or sample.topk_prompt_logprobs > 0
        or sample.target_prompt_logprobs is not None
        or sample.prompt_alt_tokens_k > 0
    )


def check_scores(request: AsampleRequest, prompt: int, limits: Limits) -> None:
    """Raise UserError when a width or a total is out of bounds. `prompt`: its length."""
    most = min(MAX_WIDTH, limits.vocab_size - 1)
    _check_width("topk_prompt_logprobs", request.topk_prompt_logprobs, most)
    _check_width("topk_sample_logprobs", request.topk_sample_logprobs, most)
    _check_width("prompt_alt_tokens_k", request.prompt_alt_tokens_k, MAX_WIDTH)
    _check_cells("topk_prompt_logprobs", prompt, request.topk_prompt_logprobs, MAX_LISTED)
    _check_cells("prompt_alt_tokens_k", prompt, request.prompt_alt_tokens_k, MAX_CELLS)
    _check_last_n(request, prompt)


def check_sampled_cells(sample: SampleRequest, tokens: int) -> None:
    """Check the total of topk_sample_logprobs. `tokens`: the most of one sequence."""
    total = sample.num_samples * tokens * sample.topk_sample_logprobs
    if total > MAX_CELLS:
        raise UserError(
            f"topk_sample_logprobs: {sample.num_samples} samples x {tokens} tokens x "
            f"{sample.topk_sample_logprobs} = {total}, expected at most {MAX_CELLS}: set a smaller max_tokens"
        )


def _check_width(field: str, width: int, most: int) -> None:
    if not 0 <= width <= most:
        raise UserError(f"{field} is {width}, expected 0 to {most}")


def _check_cells(field: str, prompt: int, width: int, most: int) -> None:
    if prompt * width > most:
        raise UserError(
            f"{field}: {prompt} prompt tokens x {width} = {prompt * width}, expected at most {most}"
        )


def _check_last_n(request: AsampleRequest, prompt: int) -> None:
    last_n = request.prompt_logprobs_last_n
    if last_n is None:
        return
    if not request.prompt_logprobs:
        raise UserError(f"prompt_logprobs_last_n is {last_n} without prompt_logprobs, expected both")
    if not 1 <= last_n <= prompt - 1:
        raise UserError(
            f"prompt_logprobs_last_n is {last_n}, expected 1 to {prompt - 1} (the prompt's length - 1)"
        )


def read_targets(tensor: TensorJson, prompt: int, limits: Limits) -> TargetTokens:
    """Read an int64 tensor [prompt - 1, K] with at least one token id, or raise UserError."""
    if tensor.dtype != "int64":
        raise UserError(f"{_TARGETS}.dtype is {tensor.dtype!r}, expected 'int64'")
    rows, width = _shape(tensor, prompt)
    tokens = tuple(tensor.data.tolist())
    check_ids(tokens, f"{_TARGETS}.data", limits.vocab_size, lowest=-1)
    if max(tokens, default=-1) < 0:
        raise UserError(f"{_TARGETS} names no token: found only -1, expected at least one token id")
    if tensor.sparse_crow_indices is not None or tensor.sparse_col_indices is not None:
        return _sparse(tensor, tokens, rows, width)
    if len(tokens) != rows * width:
        raise UserError(
            f"{_TARGETS} has {len(tokens)} values, expected {rows * width} (its shape [{rows}, {width}])"
        )
    _check_target_cells(rows, width)
    return TargetTokens((rows, width), tokens)


def _shape(tensor: TensorJson, prompt: int) -> tuple[int, int]:
    shape = None if tensor.shape is None else tensor.shape.tolist()
    if shape is None or len(shape) != 2 or shape[0] != prompt - 1 or shape[1] < 1:
        raise UserError(
            f"{_TARGETS}.shape is {shorten(shape)}, expected [{prompt - 1}, K]: a row per prompt "
            "token after the first, and K of at least 1"
        )
    return shape[0], shape[1]


def _check_target_cells(rows: int, width: int) -> None:
    """Raise UserError for too many cells. `width`: of the longest row."""
    if width > MAX_WIDTH:
        raise UserError(f"{_TARGETS} has {width} tokens in a row, expected at most {MAX_WIDTH}")
    if rows * width > MAX_CELLS:
        raise UserError(f"{_TARGETS}: {rows} rows x {width} = {rows * width}, expected at most {MAX_CELLS}")


def _sparse(tensor: TensorJson, tokens: tuple[int, ...], rows: int, width: int) -> TargetTokens:
    given = tensor.sparse_crow_indices, tensor.sparse_col_indices
    crow, col = (np.empty(0, np.int64) if indices is None else indices for indices in given)
    rows_of(crow, col, (rows, width), len(tokens), f"{_TARGETS}.sparse_")
    _check_target_cells(rows, int(np.diff(crow).max()))
    return TargetTokens((rows, width), tokens, tuple(crow.tolist()), tuple(col.tolist()))
