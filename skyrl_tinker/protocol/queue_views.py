"""The engine's queues as it reports them to the API, which tells a client why its request waits.

The size is bounded by SHOWN samples of LISTED sessions, and by the models that have waiting requests.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import orjson
from pydantic import TypeAdapter

from skyrl_tinker.domain.values import Way

SHOWN = 2000  # samples
LISTED = 500  # sessions whose samples wait
ASLEEP = "models that were idle come back when they are asked for"
"""Detail of a ready engine, until all models are there."""
INCIDENTS = 16


@dataclass(frozen=True, slots=True)
class Incident:
    """Loss of a process, or a recovery (`mended`). `at`: UTC seconds by the database's clock."""

    at: float
    text: str
    mended: bool = False


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Tokens per second, as means over the last 10 and 60 seconds."""

    over_10_s: float = 0.0
    over_60_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A sampling server; all but `state` None while it is replaced.

    `weights_by`, `adapters_by`: ways of full parameters and of adapters from the engine's host to `host`.
    """

    address: str | None
    state: Literal["serving", "replaced"]
    host: str | None = None
    weights_by: Way | None = None
    adapters_by: Way | None = None


@dataclass(frozen=True, slots=True)
class LaneView:
    """A model with requests that have not begun.

    `lowest`: the first of them; above `next_seq` when that one never came. `held`: it waits until a save of
    this model is written, or until the checkpoint that it loads is here.
    """

    next_seq: int
    lowest: int
    held: bool
    session_id: str


@dataclass(frozen=True, slots=True)
class TrainingView:
    """The queue of the trainer of one base model.

    `tenants`: sessions with runnable work, in the order of their turns. `running`: models in the current unit
    of work, of about `running_tokens` tokens, which began `running_s` ago. `next_kind`, `next_models`: of
    the unit that would follow it now. `unit_s`: recent duration of units, None before the first. `paused`:
    why none proceeds.
    """

    lanes: Mapping[int, LaneView]
    tenants: tuple[str, ...] = ()
    running: tuple[int, ...] = ()
    running_kind: str | None = None
    unit_s: float | None = None
    running_tokens: int = 0
    running_s: float | None = None
    next_kind: str | None = None
    next_models: tuple[int, ...] = ()
    incidents: tuple[Incident, ...] = ()
    paused: str | None = None


@dataclass(frozen=True, slots=True)
class QueueView:
    """One session's waiting samples: their number, and every `stride`-th future id, in order."""

    ids: tuple[int, ...]
    waiting: int


@dataclass(frozen=True, slots=True)
class SamplingView:
    """The queue of the samplers of one base model.

    `queued`: by session, in the order of their turns, which count as one sample each here; the first LISTED.
    `stride`: one in so many ids is listed. `running`: future ids of the samples that do not wait any more,
    while sessions are not listed that have some that do; else None. `per_second`: recent rate of finished
    samples. `paused`: why none proceeds. `weights`: names of the versions that every replica has loaded.
    `away`: future ids, at most SHOWN, of samples that gave their turn to others, as the storage of their
    weights did not answer; not in `queued`.
    """

    queued: Mapping[str, QueueView] = field(default_factory=dict)
    stride: int = 1
    running: tuple[int, ...] | None = None
    waiting: int = 0
    in_flight: int = 0
    per_second: float | None = None
    paused: str | None = None
    replicas: tuple[ReplicaView, ...] = ()
    weights: tuple[str, ...] = ()
    incidents: tuple[Incident, ...] = ()
    away: tuple[int, ...] = ()

    def ahead(self, session_id: str | None, future_id: int) -> int | None:
        """Return how many waiting samples come before this one; None when it no longer waits.

        Of a session that is not listed: how many do at least.
        """
        if session_id is None or session_id not in self.queued:
            return None if self.running is None or future_id in self.running else len(self.queued)
        place, queue = list(self.queued).index(session_id), self.queued[session_id]
        if future_id < queue.ids[0]:
            return None
        before = min(bisect_left(queue.ids, future_id) * self.stride, queue.waiting)
        turns = (before + (number < place) for number in range(len(self.queued)))
        return sum(min(other.waiting, turn) for other, turn in zip(self.queued.values(), turns, strict=True))


@dataclass(frozen=True, slots=True)
class QueuesView:
    """Queues of trainers and samplers by the name of their base model.

    `trained`, `sampled`: rates of all together. `idle`: seconds without requests of those on demand that run.
    `pids`: of ranks and sampling servers on the engine's host.
    """

    training: Mapping[str, TrainingView]
    sampling: Mapping[str, SamplingView]
    trained: TokenRates = TokenRates()
    sampled: TokenRates = TokenRates()
    idle: Mapping[str, float] = field(default_factory=dict)
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_NON_STR_KEYS)


_ADAPTER = TypeAdapter(QueuesView)


def queues_from_bytes(data: bytes) -> QueuesView:
    return _ADAPTER.validate_json(data)
