"""A micro-batch as tensors: one packed row."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from skyrl_tinker.training.attention import Segments
from skyrl_tinker.training.batch import TrainingInputBatch
from skyrl_tinker.wire.ids import ModelKey
from skyrl_tinker.wire.values import Int64


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a row belong to `owner` (a model's key, or a request's index)."""

    start: int
    stop: int
    owner: int

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Row:
    """Segments end to end, T tokens, positions restarting with each segment."""

    tokens: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64
    targets: torch.Tensor  # [T] int64
    inputs: Mapping[str, torch.Tensor]  # each [T] float32
    segments: Segments
    models: tuple[Span, ...]  # owner: ModelKey
    requests: tuple[Span, ...]  # owner: request index
    datums: tuple[Span, ...]  # owner: segment index in the batch


def make_row(batch: TrainingInputBatch, segments: tuple[int, ...], device: torch.device) -> Row:
    lengths = batch.lengths[list(segments)]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    where = np.concatenate([np.arange(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]) for s in segments])
    return Row(
        tokens=_tensor(batch.tokens[where].astype(np.int64), device)[None],
        positions=_tensor(np.arange(len(where)) - np.repeat(bounds[:-1], lengths), device)[None],
        targets=_tensor(batch.targets[where], device),
        inputs={name: _tensor(array[where], device) for name, array in batch.inputs.items()},
        segments=_segments(lengths, bounds, device),
        models=_spans(batch.model[list(segments)], bounds),
        requests=_spans(batch.request[list(segments)], bounds),
        datums=_spans(np.array(segments), bounds),
    )


def idle_row(device: torch.device) -> Row:
    """Two tokens of nobody's, for a rank that only keeps its peers company."""
    lengths, bounds = np.array([2]), np.array([0, 2])
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)[None]
    return Row(zeros[None], positions, zeros, {}, _segments(lengths, bounds, device), (), (), ())


def model_key(span: Span) -> ModelKey:
    return ModelKey(span.owner)


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _segments(lengths: Int64, bounds: Int64, device: torch.device) -> Segments:
    runs = tuple((sum(1 for _ in group), length) for length, group in groupby(lengths.tolist()))
    return Segments(runs, _tensor(bounds.astype(np.int32), device), int(lengths.max()))


def _spans(owners: Int64, bounds: Int64) -> tuple[Span, ...]:
    spans, number = [], 0
    for owner, group in groupby(owners.tolist()):
        count = sum(1 for _ in group)
        spans.append(Span(int(bounds[number]), int(bounds[number + count]), owner))
        number += count
    return tuple(spans)
