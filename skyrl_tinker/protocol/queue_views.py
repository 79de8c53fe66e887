"""What waits in the engine, as it tells the API: enough to say to anybody what their request waits for.

Its size is bounded by what is shown of the samples that wait and by the sessions and models that have
something waiting.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
from pydantic import TypeAdapter

SHOWN = 2000  # samples


@dataclass(frozen=True, slots=True)
class LaneView:
    """A model with requests that have not begun. `lowest`: the first of them; beyond `next_seq` when that one
    never came. `held`: it must wait until a save of this model is written."""

    next_seq: int
    lowest: int
    held: bool
    session_id: str


@dataclass(frozen=True, slots=True)
class TrainingView:
    """`tenants`: sessions that have something to run, in the order of their turns. `running`: models in the
    unit of work that runs. `unit_s`: how long units took lately, None before the first."""

    lanes: Mapping[int, LaneView]
    tenants: tuple[str, ...] = ()
    running: tuple[int, ...] = ()
    running_kind: str | None = None
    unit_s: float | None = None


@dataclass(frozen=True, slots=True)
class QueueView:
    """Of one session's `waiting` samples every `stride`-th future id, in their order."""

    ids: tuple[int, ...]
    waiting: int


@dataclass(frozen=True, slots=True)
class SamplingView:
    """`queued`: by session, in the order of their turns, which each has with one sample. `stride`: of so many
    one is shown. `per_second`: how many ended lately. `paused`: why none gets on just now."""

    queued: Mapping[str, QueueView] = field(default_factory=dict)
    stride: int = 1
    waiting: int = 0
    in_flight: int = 0
    per_second: float | None = None
    paused: str | None = None

    def ahead(self, session_id: str | None, future_id: int) -> int | None:
        """How many that wait come before this one; None when it does not wait any more."""
        if session_id is None or session_id not in self.queued:
            return None
        place, own = list(self.queued).index(session_id), self.queued[session_id]
        if future_id < own.ids[0]:
            return None
        before = min(bisect_left(own.ids, future_id) * self.stride, own.waiting)
        turns = (before + (number < place) for number in range(len(self.queued)))
        return sum(min(each.waiting, turn) for each, turn in zip(self.queued.values(), turns, strict=True))


@dataclass(frozen=True, slots=True)
class QueuesView:
    training: TrainingView
    sampling: SamplingView

    def to_bytes(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_NON_STR_KEYS)


_ADAPTER = TypeAdapter(QueuesView)


def queues_from_bytes(data: bytes) -> QueuesView:
    return _ADAPTER.validate_json(data)
