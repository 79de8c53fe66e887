"""Outputs of a pass: the ranks' shares, and their assembly into one output per request. NumPy only."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_tinker.domain.ids import RequestId
from skyrl_tinker.domain.values import Failure, Float32, PassOutput
from skyrl_tinker.training.batching.batch import TrainingInputBatch

PassMetrics = Mapping[str, float]
"""Keys: `name:sum`, `name:min`, `name:max` or `name:mean`. On the ranks, :mean is a sum over datums."""

_REDUCERS: Mapping[str, Callable[[float, float], float]] = {
    "sum": operator.add,
    "mean": operator.add,
    "min": min,
    "max": max,
}


@dataclass(frozen=True, slots=True)
class RankOutput:
    """One rank's share of a pass."""

    segments: tuple[int, ...]
    logprobs: Float32  # the segments' logprobs, cell by cell, end to end
    metrics: Mapping[int, PassMetrics]  # by request index
    failures: Mapping[int, Failure]  # by request index
    own_s: Mapping[int, float] = field(default_factory=dict)  # of custom losses, by request index
    exhausted: bool = False  # memory ran out: all requests failed


def merge_metrics(first: PassMetrics, second: PassMetrics) -> PassMetrics:
    """Reduce key by key, as the key's suffix says; a key that only one side has is kept."""
    merged = dict(first)
    for key, value in second.items():
        merged[key] = _REDUCERS[key.rpartition(":")[2]](merged[key], value) if key in merged else value
    return merged


def assemble(batch: TrainingInputBatch, outputs: Sequence[RankOutput]) -> list[PassOutput | Failure]:
    """One output per request, in the order of the requests."""
    failures = {index: failure for output in outputs for index, failure in output.failures.items()}
    metrics: dict[int, PassMetrics] = {}
    for output in outputs:
        for index, share in output.metrics.items():
            metrics[index] = merge_metrics(metrics.get(index, {}), share)
    logprobs = _by_segment(batch, outputs)
    return [
        failures.get(index) or _output(batch, index, logprobs, metrics.get(index, {"loss:sum": 0.0}))
        for index in range(len(batch.requests))
    ]


def own_seconds(batch: TrainingInputBatch, outputs: Sequence[RankOutput]) -> dict[RequestId, float]:
    """Return the seconds that ranks waited for each custom loss."""
    longest: dict[RequestId, float] = {}
    for output in outputs:
        for index, seconds in output.own_s.items():
            request = batch.requests[index].request_id
            longest[request] = max(longest.get(request, 0.0), seconds)
    return longest


def _by_segment(batch: TrainingInputBatch, outputs: Sequence[RankOutput]) -> dict[int, Float32]:
    logprobs: dict[int, Float32] = {}
    for output in outputs:
        start = 0
        for segment in output.segments:
            shape = batch.shapes[segment]
            logprobs[segment] = output.logprobs[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
    return logprobs


def _output(
    batch: TrainingInputBatch, index: int, logprobs: Mapping[int, Float32], metrics: PassMetrics
) -> PassOutput:
    segments = batch.segments_of(index)
    averaged = {
        key: value / len(segments) if key.endswith(":mean") else value for key, value in metrics.items()
    }
    return PassOutput(batch.requests[index].request_id, tuple(logprobs[s] for s in segments), averaged)
