"""Admission of sequences to the samplers."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from skyrl_tinker.engine.scheduling.fair_share import Path, Waiter, path_of
from skyrl_tinker.inference.constants import MAX_SEQUENCES, RESERVED_SEQUENCES

ALONE_S = 2.0
"""Seconds without a turn of another session after which a session counts as alone."""


class Concurrency(NamedTuple):
    """Most sequences in flight per engine core: for several sessions, and for a session that is alone."""

    shared: int
    alone: int


class SampleTurn(Waiter, Protocol):
    """Request that waits for samplers, or runs on them. `tokens`: most that it computes, prompt included."""

    @property
    def tokens(self) -> int: ...
    @property
    def sequences(self) -> int: ...


class Slots:
    """Turns in flight, in places that all sessions share, and in a reserve for sessions with none in flight.

    Samples that begin together end together: without a reserve, a newcomer might wait for the longest of
    them. Turns in the reserve take no shared place, so that newcomers cannot delay a large turn forever.
    """

    def __init__(
        self, concurrency: Concurrency, cores: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cores = cores
        self._concurrency = concurrency
        self._clock = clock
        self._newest: Path | None = None  # session that began or ended a turn last, or asked for one
        self._newest_at = -math.inf
        self._together_at = -math.inf
        self._shared = _Places(concurrency.alone)
        self._reserve = _Places(RESERVED_SEQUENCES)
        self._of_session: Counter[Path] = Counter()  # turns in flight

    def __len__(self) -> int:
        """Count the turns in flight."""
        return len(self._shared.turns) + len(self._reserve.turns)

    def turns(self) -> tuple[int, ...]:
        """Return the ids of the turns in flight."""
        return (*self._shared.turns, *self._reserve.turns)

    def take(self, turn: SampleTurn) -> bool:
        """Begin a turn if it fits; one that is larger than all places begins when none is taken."""
        together = self._are_together(path_of(turn))
        self._shared.sequences = self._concurrency.shared if together else self._concurrency.alone
        fits = self._shared.fits(turn, self._cores()) or not self._shared.turns
        return fits and self._begin(turn, self._shared)

    def take_reserved(self, turn: SampleTurn) -> bool:
        """Begin a newcomer's turn in the reserve."""
        self._are_together(path_of(turn))
        fits = not self.knows(turn) and self._reserve.fits(turn, self._cores())
        return fits and self._begin(turn, self._reserve)

    def reserve_left(self) -> int:
        """Count the free sequences of the reserve."""
        return self._reserve.left(self._cores())

    def knows(self, turn: SampleTurn) -> bool:
        """Return whether its session has turns in flight."""
        return self._of_session[path_of(turn)] > 0

    def release(self, turn_id: int) -> Path | None:
        """End a turn; ignored if not in flight. Return its session's path if it was the session's last."""
        turn = self._shared.end(turn_id) or self._reserve.end(turn_id)
        if turn is None:
            return None
        path = path_of(turn)
        self._are_together(path)
        self._of_session[path] -= 1
        if self._of_session[path]:
            return None
        del self._of_session[path]
        return path

    def _are_together(self, path: Path) -> bool:
        """Return whether other sessions have turns, or had one within ALONE_S."""
        now = self._clock()
        lately = self._newest != path and now < self._newest_at + ALONE_S
        if len(self._of_session) > (path in self._of_session):
            self._together_at = now
        elif lately:
            self._together_at = max(self._together_at, self._newest_at)
        self._newest, self._newest_at = path, now
        return now < self._together_at + ALONE_S

    def _begin(self, turn: SampleTurn, places: "_Places") -> bool:
        places.begin(turn)
        self._of_session[path_of(turn)] += 1
        return True


@dataclass
class _Places:
    """Turns in places. `sequences`: places per engine core."""

    sequences: int
    turns: dict[int, SampleTurn] = field(default_factory=dict)  # by id
    taken: int = 0

    def fits(self, turn: SampleTurn, cores: int) -> bool:
        return width(turn) <= self.left(cores)

    def left(self, cores: int) -> int:
        return self.sequences * cores - self.taken

    def begin(self, turn: SampleTurn) -> None:
        self.turns[turn.id] = turn
        self.taken += width(turn)

    def end(self, turn_id: int) -> SampleTurn | None:
        turn = self.turns.pop(turn_id, None)
        self.taken -= 0 if turn is None else width(turn)
        return turn


def width(turn: SampleTurn) -> int:
    """Count the sequences of a turn that are with a sampler at the same time (SampleCall.execute)."""
    return min(turn.sequences, MAX_SEQUENCES)
