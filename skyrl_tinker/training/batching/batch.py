"""Requests as flat arrays, and micro-batches of them per rank. NumPy only: the engine runs it too."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.loss_specs import LOSSES, LossSpec
from skyrl_tinker.domain.values import (
    CustomLoss,
    Datum,
    Float32,
    Int32,
    Int64,
    Number,
    PassItem,
    ReplayedExperts,
)
from skyrl_tinker.training.batching.even_rows import SequenceCost, even_rows


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request of a pass without its data. `loss_config` has its defaults filled in."""

    request_id: RequestId
    model: ModelKey
    seq_id: int
    loss_fn: str
    loss_config: Mapping[str, float]
    backward: bool
    custom: CustomLoss | None

    @property
    def loss(self) -> LossSpec:
        return LOSSES[self.loss_fn]


@dataclass(frozen=True, slots=True)
class TrainingInputBatch:
    """The datums of a pass, end to end.

    Segment s is one datum of N tokens and owns tokens [cu_seqlens[s], cu_seqlens[s+1]) and cells
    [cu_cells[s], cu_cells[s+1]).

    A cell is one candidate at one position: a datum has N of them, or N * K, position by position.
    Segments lie in (model, seq_id, datum) order, so one model's tokens are contiguous.
    T tokens, C cells, S segments, R requests.
    """

    tokens: Int32  # [T]
    targets: Int64  # [C]
    inputs: Mapping[str, Float32]  # by name, each [C]; zero for requests whose loss does not read it
    custom_inputs: Mapping[int, Mapping[str, Number]]  # by segment: inputs of a custom loss, as sent
    cu_seqlens: Int64  # [S + 1]
    cu_cells: Int64  # [S + 1]
    shapes: tuple[tuple[int, ...], ...]  # S: shape of the datum's targets, (N,) or (N, K)
    model: Int64  # [S]
    request: Int64  # [S], index into requests
    datum: Int64  # [S], index into the request's data
    requests: tuple[RequestInfo, ...]  # R, in the order they were given
    replayed: Mapping[int, ReplayedExperts] = field(default_factory=dict)  # by segment, if recorded

    @property
    def lengths(self) -> Int64:
        return np.diff(self.cu_seqlens)

    def cells_of(self, segment: int) -> slice:
        return slice(int(self.cu_cells[segment]), int(self.cu_cells[segment + 1]))

    def segments_of(self, request: int) -> list[int]:
        """Segments of one request, in the order of its data."""
        segments: list[int] = np.flatnonzero(self.request == request).tolist()
        return segments


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row for one rank. Without segments the rank only joins its peers' collectives."""

    network: ModelKey | None  # None: the shared frozen base under LoRA; else a full-parameter model's own
    backward: bool
    segments: tuple[int, ...]


def build_batch(items: Sequence[PassItem]) -> TrainingInputBatch:
    order = sorted(range(len(items)), key=lambda index: (items[index].model, items[index].seq_id))
    segments = [(index, datum) for index in order for datum in range(len(items[index].data))]
    data = [items[index].data[datum] for index, datum in segments]
    specs = [LOSSES[items[index].loss_fn] for index, _ in segments]
    return TrainingInputBatch(
        tokens=_join((datum.tokens for datum in data), np.int32),
        targets=_join((datum.target_tokens.reshape(-1) for datum in data), np.int64),
        inputs=_inputs(data, specs),
        custom_inputs={
            number: datum.inputs
            for number, (datum, spec) in enumerate(zip(data, specs, strict=True))
            if spec.name == "custom"
        },
        cu_seqlens=cumulative([len(datum.tokens) for datum in data]),
        cu_cells=cumulative([datum.target_tokens.size for datum in data]),
        shapes=tuple(datum.target_tokens.shape for datum in data),
        model=np.array([items[index].model for index, _ in segments], np.int64),
        request=np.array([index for index, _ in segments], np.int64),
        datum=np.array([datum for _, datum in segments], np.int64),
        requests=tuple(_info(item) for item in items),
        replayed={number: datum.replayed for number, datum in enumerate(data) if datum.replayed is not None},
    )


def micro_batches(
    batch: TrainingInputBatch,
    alive: frozenset[int],
    network_of: Callable[[ModelKey], ModelKey | None],
    world: int,
    budget: int,
    *,
    cost_of: Callable[[ModelKey | None, bool], SequenceCost] | None = None,
    forward_only: bool = False,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of the requests in `alive`: one list per rank, all of equal length.

    `cost_of`: (network, whether there is a backward pass) -> cost of a sequence; ranks get even total costs.
    None: contiguous shares; on a single rank a request is then cut in the same places in every pass.
    """
    plans: list[list[MicroBatch]] = [[] for _ in range(world)]
    for (network, backward), segments in _groups(batch, alive, network_of, forward_only):
        if cost_of is None:
            rows = [_pack(batch, share, budget) for share in _shares(batch, segments, world)]
        else:
            lengths = dict(zip(segments, batch.lengths[segments].tolist(), strict=True))
            rows = even_rows(lengths, cost_of(network, backward), world, budget)
        for number in range(max(map(len, rows))):
            for plan, packed in zip(plans, rows, strict=True):
                plan.append(MicroBatch(network, backward, packed[number] if number < len(packed) else ()))
    return plans


def cumulative(sizes: Sequence[int] | Int64) -> Int64:
    """Bounds of parts that lie end to end: 0, then the running sums."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _join(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    parts = list(arrays)
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def _inputs(data: Sequence[Datum], specs: Sequence[LossSpec]) -> dict[str, Float32]:
    names = sorted({name for spec in specs for name in _names(spec)})
    return {
        name: _join((_input(datum, spec, name) for datum, spec in zip(data, specs, strict=True)), np.float32)
        for name in names
    }


def _names(spec: LossSpec) -> tuple[str, ...]:
    return (*spec.inputs, *spec.optional, *spec.recorded)


def _input(datum: Datum, spec: LossSpec, name: str) -> np.ndarray:
    values = datum.inputs.get(name) if name in _names(spec) else None
    if values is None:
        return np.full(datum.target_tokens.size, spec.optional.get(name, 0.0), np.float32)
    return values.reshape(-1)


def _info(item: PassItem) -> RequestInfo:
    config = {key: spec.default for key, spec in LOSSES[item.loss_fn].config.items()}
    config |= item.loss_config
    return RequestInfo(
        item.request_id, item.model, item.seq_id, item.loss_fn, config, item.backward, item.custom
    )


_GroupKey = tuple[ModelKey | None, bool]


def _groups(
    batch: TrainingInputBatch,
    alive: frozenset[int],
    network_of: Callable[[ModelKey], ModelKey | None],
    forward_only: bool,
) -> Iterator[tuple[_GroupKey, list[int]]]:
    """Group segments that may share a row: same network, and all with or all without a backward pass."""
    groups: dict[_GroupKey, list[int]] = {}
    for segment, index in enumerate(batch.request.tolist()):
        if index in alive:
            info = batch.requests[index]
            backward = info.backward and not forward_only
            groups.setdefault((network_of(info.model), backward), []).append(segment)
    yield from groups.items()


def _shares(batch: TrainingInputBatch, segments: list[int], world: int) -> list[list[int]]:
    """Split into contiguous shares of about equal token counts: a segment goes where its middle falls."""
    lengths = batch.lengths[segments]
    middles = np.cumsum(lengths) - lengths / 2
    owners = np.minimum((middles * world / lengths.sum()).astype(np.int64), world - 1)
    return [[s for s, owner in zip(segments, owners, strict=True) if owner == rank] for rank in range(world)]


def _pack(batch: TrainingInputBatch, segments: list[int], budget: int) -> list[tuple[int, ...]]:
    """Pack rows of at most `budget` tokens (a longer segment gets a row of its own).

    Rows are filled from pieces that are cut per request first, so that the partial sums of a request's
    gradients do not depend on the other requests of the pass.
    """
    pieces = [
        piece
        for _, group in groupby(segments, key=lambda segment: batch.request[segment])
        for piece in _fill([(segment,) for segment in group], batch.lengths, budget)
    ]
    return _fill(pieces, batch.lengths, budget)


def _fill(pieces: Iterable[tuple[int, ...]], lengths: Int64, budget: int) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    left = 0
    for piece in pieces:
        size = int(lengths[list(piece)].sum())
        if rows and size <= left:
            rows[-1] += piece
            left -= size
        else:
            rows.append(piece)
            left = budget - size
    return rows
