"""What waits in the engine, as it tells the API: enough to say to anybody what their request waits for.

Its size is bounded by what is shown of the samples that wait and by the models that have something waiting.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

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
class SamplingView:
    """`queued`: every `stride`-th future id of the `waiting` samples, in their order. `per_second`: how many
    ended lately. `paused`: why none gets on just now."""

    queued: tuple[int, ...] = ()
    stride: int = 1
    waiting: int = 0
    in_flight: int = 0
    per_second: float | None = None
    paused: str | None = None

    def ahead(self, future_id: int) -> int | None:
        """How many that wait come before this one; None when it does not wait any more."""
        if not self.queued or future_id < self.queued[0]:
            return None
        return min(bisect_left(self.queued, future_id) * self.stride, self.waiting)


@dataclass(frozen=True, slots=True)
class QueuesView:
    training: TrainingView
    sampling: SamplingView

    def to_bytes(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_NON_STR_KEYS)


_ADAPTER = TypeAdapter(QueuesView)


def queues_from_bytes(data: bytes) -> QueuesView:
    return _ADAPTER.validate_json(data)
