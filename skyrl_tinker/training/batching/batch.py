"""From requests to flat arrays, and on to micro-batches per rank. NumPy only: the engine runs it too."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.loss_specs import LOSSES, LossSpec
from skyrl_tinker.domain.values import CustomLoss, Datum, Float32, Int32, Int64, Number, PassItem


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
    """The datums of a pass, end to end: segment s is one datum of N tokens and owns tokens
    [cu_seqlens[s], cu_seqlens[s+1]) and cells [cu_cells[s], cu_cells[s+1]).

    A cell is one candidate at one position: a datum has N of them, or N * K, position by position.
    Segments lie in (model, seq_id, datum) order, so one model's tokens are contiguous.
    T tokens, C cells, S segments, R requests.
    """

    tokens: Int32  # [T]
    targets: Int64  # [C]
    inputs: Mapping[str, Float32]  # each [C], those that any loss of the pass reads; zero where it does not
    own_inputs: Mapping[int, Mapping[str, Number]]  # by segment: what a custom loss reads, as it was sent
    cu_seqlens: Int64  # [S + 1]
    cu_cells: Int64  # [S + 1]
    shapes: tuple[tuple[int, ...], ...]  # S: that of the datum's targets, (N,) or (N, K)
    model: Int64  # [S]
    request: Int64  # [S], index into requests
    datum: Int64  # [S], index into the request's data
    requests: tuple[RequestInfo, ...]  # R, in the order they were given

    @property
    def lengths(self) -> Int64:
        return np.diff(self.cu_seqlens)

    def cells_of(self, segment: int) -> slice:
        return slice(int(self.cu_cells[segment]), int(self.cu_cells[segment + 1]))

    def segments_of(self, request: int) -> list[int]:
        """In the order of its data."""
        found: list[int] = np.flatnonzero(self.request == request).tolist()
        return found


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row for one rank. No segments: the rank only keeps its peers' collectives company."""

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
        own_inputs={
            number: datum.inputs
            for number, (datum, spec) in enumerate(zip(data, specs, strict=True))
            if spec.name == "custom"
        },
        cu_seqlens=_bounds(len(datum.tokens) for datum in data),
        cu_cells=_bounds(datum.target_tokens.size for datum in data),
        shapes=tuple(datum.target_tokens.shape for datum in data),
        model=np.array([items[index].model for index, _ in segments], np.int64),
        request=np.array([index for index, _ in segments], np.int64),
        datum=np.array([datum for _, datum in segments], np.int64),
        requests=tuple(_info(item) for item in items),
    )


def micro_batches(
    batch: TrainingInputBatch,
    alive: frozenset[int],
    network_of: Callable[[ModelKey], ModelKey | None],
    world: int,
    budget: int,
    *,
    forward_only: bool = False,
) -> list[list[MicroBatch]]:
    """What each rank runs, one list per rank and all of one length, for the requests in `alive`."""
    plans: list[list[MicroBatch]] = [[] for _ in range(world)]
    for (network, backward), segments in _groups(batch, alive, network_of, forward_only):
        rows = [_pack(batch, share, budget) for share in _shares(batch, segments, world)]
        for number in range(max(map(len, rows))):
            for plan, own in zip(plans, rows, strict=True):
                plan.append(MicroBatch(network, backward, own[number] if number < len(own) else ()))
    return plans


def _join(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    found = list(arrays)
    return np.concatenate(found).astype(dtype, copy=False) if found else np.empty(0, dtype)


def _bounds(sizes: Iterable[int]) -> Int64:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _inputs(data: Sequence[Datum], specs: Sequence[LossSpec]) -> dict[str, Float32]:
    names = sorted({name for spec in specs for name in _names(spec)})
    return {
        name: _join((_input(*each, name) for each in zip(data, specs, strict=True)), np.float32)
        for name in names
    }


def _names(spec: LossSpec) -> tuple[str, ...]:
    return (*spec.inputs, *spec.optional, *spec.recorded)


def _input(datum: Datum, spec: LossSpec, name: str) -> np.ndarray:
    found = datum.inputs.get(name) if name in _names(spec) else None
    if found is None:
        return np.full(datum.target_tokens.size, spec.optional.get(name, 0.0), np.float32)
    return found.reshape(-1)


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
    """Segments that may share a row: same network, and either all with or all without a backward pass."""
    groups: dict[_GroupKey, list[int]] = {}
    for segment, index in enumerate(batch.request.tolist()):
        if index in alive:
            info = batch.requests[index]
            backward = info.backward and not forward_only
            groups.setdefault((network_of(info.model), backward), []).append(segment)
    yield from groups.items()


def _shares(batch: TrainingInputBatch, segments: list[int], world: int) -> list[list[int]]:
    """Contiguous shares of about equal token counts: a segment goes where its middle falls."""
    lengths = batch.lengths[segments]
    middles = np.cumsum(lengths) - lengths / 2
    owners = np.minimum((middles * world / lengths.sum()).astype(np.int64), world - 1)
    return [[s for s, owner in zip(segments, owners, strict=True) if owner == rank] for rank in range(world)]


def _pack(batch: TrainingInputBatch, segments: list[int], budget: int) -> list[tuple[int, ...]]:
    """Rows of at most `budget` tokens (a longer segment gets a row of its own).

    Rows are filled from pieces that are cut per request first, so that where its gradients are cut into
    partial sums does not depend on what else is in the pass.
    """
    pieces = [
        piece
        for _, own in groupby(segments, key=lambda segment: batch.request[segment])
        for piece in _fill([(segment,) for segment in own], batch.lengths, budget)
    ]
    return _fill(pieces, batch.lengths, budget)


def _fill(pieces: Iterable[tuple[int, ...]], lengths: Int64, budget: int) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    room = 0
    for piece in pieces:
        size = int(lengths[list(piece)].sum())
        if rows and size <= room:
            rows[-1] += piece
            room -= size
        else:
            rows.append(piece)
            room = budget - size
    return rows
