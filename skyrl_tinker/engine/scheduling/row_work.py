"""Work of a training request, estimated without reading its body: all that a schedule knows of it."""

from skyrl_tinker.domain.ids import ModelKey, RequestKind
from skyrl_tinker.store.futures.queue import QueuedRow

PASSES = frozenset({RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD})
TOKEN_WORK = {RequestKind.FORWARD: 1, RequestKind.FORWARD_BACKWARD: 3}
"""Work of a token by kind of pass: a backward pass costs two forward passes."""
Work = int | RequestKind
"""Tokens of a pass, weighted by its kind, or the kind of a barrier: all that an estimate depends on."""
_BYTES_PER_TOKEN = 16  # a stored token: id 4, target 8, one float 4 (RL losses have two)


def cost(row: QueuedRow) -> int:
    """Estimate the tokens of a pass."""
    return row.body_bytes // _BYTES_PER_TOKEN or 1


def work_of(row: QueuedRow) -> Work:
    per_token = TOKEN_WORK.get(row.kind)
    return row.kind if per_token is None else per_token * cost(row)


def model_of(row: QueuedRow) -> ModelKey:
    assert row.model_key is not None, "training requests have a model"
    return row.model_key
