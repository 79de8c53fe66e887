"""A micro-batch as tensors: one packed row."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from skyrl_tinker.domain.values import Int64
from skyrl_tinker.training.batching.batch import TrainingInputBatch, cumulative


@dataclass(frozen=True, slots=True)
class Segments:
    """Positions of the sequences in a packed row of T tokens."""

    runs: tuple[tuple[int, int], ...]  # (count, length): consecutive segments of equal length
    cu_seqlens: torch.Tensor  # [S + 1] int32
    longest: int


SMALLEST = 16
"""Least number of tokens in a row. For fewer, BLAS may sum up in another order, for layers of 256 inputs and
more, so a datum alone would not equal, to the bit, the same datum among others.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens or cells [start, stop) of a row that belong to `owner` (a model's key, or a request's index)."""

    start: int
    stop: int
    owner: int

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Replayed:
    """Experts for the T tokens of a row in place of the router's choice, where they are known."""

    experts: torch.Tensor  # [T, layers, k] uint8 or int16
    known: torch.Tensor  # [T, 1] bool


@dataclass(frozen=True, slots=True)
class Row:
    """Segments end to end, T tokens with C cells, positions restarting with each segment.

    The last tokens may be padding: a segment without cells, up to the smallest row.
    """

    tokens: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64
    targets: torch.Tensor  # [C] int64
    cell_tokens: torch.Tensor | None  # [C] int64, the token of each cell, rising; None: one each
    inputs: Mapping[str, torch.Tensor]  # each [C] float32
    segments: Segments
    models: tuple[Span, ...]  # of tokens, by request; owner: ModelKey
    requests: tuple[Span, ...]  # of cells, in the same order; owner: request index
    dense: tuple[bool, ...]  # in the same order: most cells have a gradient
    datums: tuple[Span, ...]  # of cells; owner: segment index in the batch
    replayed: Replayed | None = None


def make_row(batch: TrainingInputBatch, segments: tuple[int, ...], device: torch.device) -> Row:
    chosen = list(segments)
    lengths = batch.lengths[chosen]
    filler = max(0, SMALLEST - int(lengths.sum()))
    padded = np.append(lengths, filler) if filler else lengths
    bounds = cumulative(padded)
    cell_bounds = cumulative(np.diff(batch.cu_cells)[chosen])
    tokens = _ranges(batch.cu_seqlens, chosen)
    cells = _ranges(batch.cu_cells, chosen)
    requests = _spans(batch.request[chosen], cell_bounds)
    return Row(
        tokens=_tensor(np.pad(batch.tokens[tokens].astype(np.int64), (0, filler)), device)[None],
        positions=_tensor(np.arange(bounds[-1]) - np.repeat(bounds[:-1], padded), device)[None],
        targets=_tensor(batch.targets[cells], device),
        cell_tokens=_cell_tokens(batch, chosen, device),
        inputs={name: _tensor(array[cells], device) for name, array in batch.inputs.items()},
        segments=_segments(padded, bounds, device),
        models=_models(batch, _spans(batch.request[chosen], bounds)),
        requests=requests,
        dense=_dense(batch, cells, requests),
        datums=_spans(np.array(segments), cell_bounds),
        replayed=_replayed(batch, chosen, bounds, device),
    )


def idle_row(device: torch.device) -> Row:
    """Make a row of padding, for a rank that only takes part in its peers' collectives."""
    lengths, bounds = np.array([SMALLEST]), np.array([0, SMALLEST])
    zeros = torch.zeros(SMALLEST, dtype=torch.int64, device=device)
    positions = torch.arange(SMALLEST, device=device)[None]
    segments = _segments(lengths, bounds, device)
    return Row(zeros[None], positions, zeros, None, {}, segments, (), (), (), ())


def _replayed(
    batch: TrainingInputBatch, segments: list[int], bounds: Int64, device: torch.device
) -> Replayed | None:
    parts = [(start, batch.replayed.get(s)) for s, start in zip(segments, bounds.tolist(), strict=False)]
    present = [(slice(start, start + len(part.known)), part) for start, part in parts if part is not None]
    if not present:
        return None
    first = present[0][1].experts
    experts, known = np.zeros((bounds[-1], *first.shape[1:]), first.dtype), np.zeros((bounds[-1], 1), bool)
    for place, part in present:
        experts[place], known[place, 0] = part.experts, part.known
    return Replayed(_tensor(experts, device), _tensor(known, device))


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device; to a GPU from pinned memory, so that the host does not wait for queued work."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _ranges(bounds: Int64, segments: Iterable[int]) -> Int64:
    return np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in segments])


def _cell_tokens(batch: TrainingInputBatch, segments: list[int], device: torch.device) -> torch.Tensor | None:
    if all(len(batch.shapes[segment]) == 1 for segment in segments):
        return None
    shapes = [batch.shapes[segment] for segment in segments]
    per_token = np.concatenate([np.full(shape[0], math.prod(shape[1:])) for shape in shapes])
    return _tensor(np.repeat(np.arange(len(per_token)), per_token), device)


def _dense(batch: TrainingInputBatch, cells: Int64, requests: Iterable[Span]) -> tuple[bool, ...]:
    weighted = np.zeros(len(cells), bool)
    for name in batch.inputs.keys() & {"weights", "advantages"}:
        weighted |= batch.inputs[name][cells] != 0
    return tuple(2 * int(np.count_nonzero(weighted[span.part])) > len(span) for span in requests)


def _segments(lengths: Int64, bounds: Int64, device: torch.device) -> Segments:
    runs = tuple((sum(1 for _ in group), length) for length, group in groupby(lengths.tolist()))
    return Segments(runs, _tensor(bounds.astype(np.int32), device), int(lengths.max()))


def _models(batch: TrainingInputBatch, requests: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(Span(span.start, span.stop, batch.requests[span.owner].model) for span in requests)


def _spans(owners: Int64, bounds: Int64) -> tuple[Span, ...]:
    spans, number = [], 0
    for owner, group in groupby(owners.tolist()):
        count = sum(1 for _ in group)
        spans.append(Span(int(bounds[number]), int(bounds[number + count]), owner))
        number += count
    return tuple(spans)
