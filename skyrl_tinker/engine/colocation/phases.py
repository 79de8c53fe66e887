"""Timing of the phases of trainer and samplers on shared devices. Pure: state -> seconds until a switch."""

import math
from dataclasses import dataclass
from enum import StrEnum

from skyrl_tinker.config import Phases

IDLE_S = 0.05
"""Time for a client to send its next request after a result: a switch costs more."""


class PhaseState(StrEnum):
    SAMPLING = "sampling"
    TO_TRAINING = "to_training"
    TRAINING = "training"
    TO_SAMPLING = "to_sampling"


@dataclass(slots=True)
class PhaseTotals:
    """Number and total seconds of one state; for TO_TRAINING and TO_SAMPLING, the cost of switching."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseView:
    """State of a phase at one moment; all times in seconds."""

    lasted: float  # since the phase began
    idle: float | None  # how long this side has had no work; None: it has work
    waited: float | None  # longest wait on the other side; None: nothing waits


def due_in(view: PhaseView, limits: Phases) -> float:
    """Return the seconds until this phase should end; <= 0: now; infinity: not before the state changes.

    It goes on while this side has work and the other has waited less than `max_s`; without work it ends after
    a client's round trip. Neither side starves: each wait ends at `max_s`, each phase lasts `min_s`.
    """
    if view.waited is None:
        return math.inf
    left = limits.max_s - view.waited
    if view.idle is not None:
        left = min(left, IDLE_S - view.idle)
    return max(left, limits.min_s - view.lasted)
