"""From requests to flat arrays, and on to micro-batches per rank. NumPy only: the engine runs it too."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from skyrl_tinker.wire.ids import ModelKey, RequestId
from skyrl_tinker.wire.losses import LOSSES
from skyrl_tinker.wire.values import Datum, Float32, Int32, Int64, PassItem

INPUT_NAMES: tuple[str, ...] = tuple(sorted({name for spec in LOSSES.values() for name in spec.inputs}))


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request of a pass without its data. `loss_config` has its defaults filled in."""

    request_id: RequestId
    model: ModelKey
    loss_fn: str
    loss_config: Mapping[str, float]
    backward: bool


@dataclass(frozen=True, slots=True)
class TrainingInputBatch:
    """The datums of a pass, end to end: segment s is one datum and owns [cu_seqlens[s], cu_seqlens[s+1]).

    Segments lie in (model, order of requests, datum) order, so one model's tokens are contiguous.
    T tokens, S segments, R requests.
    """

    tokens: Int32  # [T]
    targets: Int64  # [T]
    inputs: Mapping[str, Float32]  # each [T]; zero where the segment's loss does not use it
    cu_seqlens: Int64  # [S + 1]
    model: Int64  # [S]
    request: Int64  # [S], index into requests
    datum: Int64  # [S], index into the request's data
    requests: tuple[RequestInfo, ...]  # R, in the order they were given

    @property
    def lengths(self) -> Int64:
        return np.diff(self.cu_seqlens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row for one rank. No segments: the rank only keeps its peers' collectives company."""

    network: ModelKey | None  # None: the shared frozen base under LoRA; else a full-parameter model's own
    backward: bool
    segments: tuple[int, ...]


def build_batch(items: Sequence[PassItem]) -> TrainingInputBatch:
    order = sorted(range(len(items)), key=lambda index: items[index].model)
    segments = [(index, datum) for index in order for datum in range(len(items[index].data))]
    data = [items[index].data[datum] for index, datum in segments]
    lengths = np.array([0, *(len(datum.tokens) for datum in data)], np.int64)
    return TrainingInputBatch(
        tokens=_join((datum.tokens for datum in data), np.int32),
        targets=_join((datum.target_tokens for datum in data), np.int64),
        inputs={name: _join((_input(datum, name) for datum in data), np.float32) for name in INPUT_NAMES},
        cu_seqlens=np.cumsum(lengths),
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
) -> list[list[MicroBatch]]:
    """What each rank runs, one list per rank and all of one length, for the requests in `alive`."""
    plans: list[list[MicroBatch]] = [[] for _ in range(world)]
    for (network, backward), segments in _groups(batch, alive, network_of):
        rows = [_pack(batch, share, budget) for share in _shares(batch, segments, world)]
        for number in range(max(map(len, rows))):
            for plan, own in zip(plans, rows, strict=True):
                plan.append(MicroBatch(network, backward, own[number] if number < len(own) else ()))
    return plans


def _join(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    found = list(arrays)
    return np.concatenate(found).astype(dtype, copy=False) if found else np.empty(0, dtype)


def _input(datum: Datum, name: str) -> Float32:
    found = datum.inputs.get(name)
    return np.zeros(len(datum.tokens), np.float32) if found is None else found


def _info(item: PassItem) -> RequestInfo:
    config = {key: spec.default for key, spec in LOSSES[item.loss_fn].config.items()}
    config |= item.loss_config
    return RequestInfo(item.request_id, item.model, item.loss_fn, config, item.backward)


_GroupKey = tuple[ModelKey | None, bool]


def _groups(
    batch: TrainingInputBatch, alive: frozenset[int], network_of: Callable[[ModelKey], ModelKey | None]
) -> Iterator[tuple[_GroupKey, list[int]]]:
    """Segments that may share a row: same network, and either all with or all without a backward pass."""
    groups: dict[_GroupKey, list[int]] = {}
    for segment, index in enumerate(batch.request.tolist()):
        if index in alive:
            info = batch.requests[index]
            groups.setdefault((network_of(info.model), info.backward), []).append(segment)
    yield from groups.items()


def _shares(batch: TrainingInputBatch, segments: list[int], world: int) -> list[list[int]]:
    """Contiguous shares of about equal token counts: a segment goes where its middle falls."""
    lengths = batch.lengths[segments]
    middles = np.cumsum(lengths) - lengths / 2
    owners = np.minimum((middles * world / lengths.sum()).astype(np.int64), world - 1)
    return [[s for s, owner in zip(segments, owners, strict=True) if owner == rank] for rank in range(world)]


def _pack(batch: TrainingInputBatch, segments: list[int], budget: int) -> list[tuple[int, ...]]:
    """Rows of at most `budget` tokens (a longer segment gets a row of its own).

    Rows are filled from pieces that are cut per model first, so that where a model's gradients are cut
    into partial sums does not depend on who else is in the pass.
    """
    pieces = [
        piece
        for _, own in groupby(segments, key=lambda segment: batch.model[segment])
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
