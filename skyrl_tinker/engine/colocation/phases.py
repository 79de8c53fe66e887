"""When trainer and samplers that share devices take turns. Pure: a moment in, seconds to the switch out."""

import math
from dataclasses import dataclass
from enum import StrEnum

IDLE_S = 0.05
"""A client that got an answer has this long for its next request: a switch costs more."""


class PhaseState(StrEnum):
    SAMPLING = "sampling"
    TO_TRAINING = "to_training"
    TRAINING = "training"
    TO_SAMPLING = "to_sampling"
    BROKEN = "broken"  # the trainer's state could not be moved: only a new engine helps


@dataclass(slots=True)
class Spent:
    """What one state took so far; of TO_TRAINING and TO_SAMPLING it is the cost of switching."""

    count: int = 0
    seconds: float = 0.0

    def turns(self) -> float:
        return self.count

    def duration(self) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """A phase lasts at least `min_s`; at `max_s` of waiting on the other side it ends, however busy it is."""

    min_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class PhaseView:
    """One moment of a phase; all times in seconds."""

    lasted: float  # since the phase began
    idle: float | None  # how long this side has had nothing to do; None: it has work
    waited: float | None  # by whoever waits longest on the other side; None: nobody does


def due_in(view: PhaseView, limits: PhaseLimits) -> float:
    """Seconds until this phase should end as things stand; <= 0: now, infinity: not before something changes.

    It stays while there is work here and the other side's patience lasts; without work here it goes over
    after a client's round trip. Neither side starves: each wait ends at `max_s`, each phase lasts `min_s`.
    """
    if view.waited is None:
        return math.inf
    patience = limits.max_s - view.waited
    if view.idle is not None:
        patience = min(patience, IDLE_S - view.idle)
    return max(patience, limits.min_s - view.lasted)
