"""Scores that an asample may request: those of the prompt, and the likeliest tokens."""

from itertools import pairwise

from skyrl_tinker.domain.samples import SampleRequest, TargetTokens
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import MAX_INT64, shorten
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
        raise UserError(f"{_TARGETS}.dtype is {shorten(tensor.dtype)}, expected 'int64'")
    rows, width = _shape(tensor, prompt)
    check_ids(tensor.data, f"{_TARGETS}.data", limits.vocab_size, lowest=-1)
    if max(tensor.data, default=-1) < 0:
        raise UserError(f"{_TARGETS} names no token: found only -1, expected at least one token id")
    if tensor.sparse_crow_indices is not None or tensor.sparse_col_indices is not None:
        return _sparse(tensor, rows, width)
    if len(tensor.data) != rows * width:
        raise UserError(
            f"{_TARGETS} has {len(tensor.data)} values, expected {rows * width} (its shape [{rows}, {width}])"
        )
    _check_target_cells(rows, width)
    return TargetTokens((rows, width), tuple(tensor.data))


def _shape(tensor: TensorJson, prompt: int) -> tuple[int, int]:
    shape = tensor.shape or []
    if len(shape) != 2 or shape[0] != prompt - 1 or shape[1] < 1:
        raise UserError(
            f"{_TARGETS}.shape is {shorten(tensor.shape)}, expected [{prompt - 1}, K]: a row per prompt "
            "token after the first, and K of at least 1"
        )
    if shape[1] > MAX_INT64:  # possible in CSR, whose rows list few of their cells
        raise UserError(f"{_TARGETS}.shape is {shorten(tensor.shape)}, expected int64 numbers")
    return shape[0], shape[1]


def _check_target_cells(rows: int, width: int) -> None:
    """Raise UserError for too many cells. `width`: of the longest row."""
    if width > MAX_WIDTH:
        raise UserError(f"{_TARGETS} has {width} tokens in a row, expected at most {MAX_WIDTH}")
    if rows * width > MAX_CELLS:
        raise UserError(f"{_TARGETS}: {rows} rows x {width} = {rows * width}, expected at most {MAX_CELLS}")


def _sparse(tensor: TensorJson, rows: int, width: int) -> TargetTokens:
    crow, col = tensor.sparse_crow_indices or [], tensor.sparse_col_indices or []
    count = len(tensor.data)
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != count or crow != sorted(crow):
        raise UserError(
            f"{_TARGETS}.sparse_crow_indices: found {len(crow)} values, "
            f"expected {rows + 1} that rise from 0 to {count} (the number of values)"
        )
    if len(col) != count:
        raise UserError(f"{_TARGETS}.sparse_col_indices has {len(col)} values, expected {count}")
    for row, (start, end) in enumerate(pairwise(crow)):
        columns = col[start:end]
        if columns and not _rising(columns, width):
            raise UserError(
                f"{_TARGETS}.sparse_col_indices: row {row} has {columns[:8]}, "
                f"expected rising numbers in [0, {width})"
            )
    _check_target_cells(rows, max(end - start for start, end in pairwise(crow)))
    return TargetTokens((rows, width), tuple(tensor.data), tuple(crow), tuple(col))


def _rising(columns: list[int], width: int) -> bool:
    return columns[0] >= 0 and columns[-1] < width and all(a < b for a, b in pairwise(columns))
