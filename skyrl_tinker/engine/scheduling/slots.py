"""Sequences that the samplers work on, and who may add to them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.engine.scheduling.fair_share import Waiter
from skyrl_tinker.inference.constants import MAX_SEQUENCES, RESERVED_SEQUENCES


class SampleTurn(Waiter, Protocol):
    """Request that waits for samplers, or has them. `tokens`: the most that it computes, prompt included."""

    @property
    def tokens(self) -> int: ...
    @property
    def sequences(self) -> int: ...


class Slots:
    """Turns in flight, in places that all share, and in a reserve for sessions that have nothing in flight.

    Samples that begin together end together: a newcomer might wait for as long as the longest of them takes.
    What is in the reserve takes no shared place, so that no stream of newcomers keeps a large turn waiting.
    """

    def __init__(self, sequences: int, cores: Callable[[], int]) -> None:
        """`sequences`: per engine core, that all share."""
        self._cores = cores
        self._shared = _Places(sequences)
        self._reserve = _Places(RESERVED_SEQUENCES)
        self._of_session: Counter[tuple[OwnerId | None, SessionId]] = Counter()  # turns in flight

    def __len__(self) -> int:
        """Count the turns in flight."""
        return len(self._shared.turns) + len(self._reserve.turns)

    def take(self, turn: SampleTurn) -> bool:
        """Begin a turn where it fits; one that is larger than all there is begins without others."""
        fits = self._shared.fits(turn, self._cores()) or not self._shared.turns
        return fits and self._begin(turn, self._shared)

    def take_reserved(self, turn: SampleTurn) -> bool:
        """Begin a newcomer's turn in the reserve."""
        fits = not self.knows(turn) and self._reserve.fits(turn, self._cores())
        return fits and self._begin(turn, self._reserve)

    def knows(self, turn: SampleTurn) -> bool:
        """Return whether its session has turns in flight."""
        return self._of_session[turn.owner_id, turn.session_id] > 0

    def release(self, turn_id: int) -> None:
        """End a turn; one that is not in flight is ignored."""
        turn = self._shared.end(turn_id) or self._reserve.end(turn_id)
        if turn is not None:
            session = turn.owner_id, turn.session_id
            self._of_session[session] -= 1
            if not self._of_session[session]:
                del self._of_session[session]

    def _begin(self, turn: SampleTurn, places: "_Places") -> bool:
        places.begin(turn)
        self._of_session[turn.owner_id, turn.session_id] += 1
        return True


@dataclass
class _Places:
    """Turns that have places, of which each engine core has `sequences`."""

    sequences: int
    turns: dict[int, SampleTurn] = field(default_factory=dict)  # by id
    taken: int = 0

    def fits(self, turn: SampleTurn, cores: int) -> bool:
        return self.taken + _width(turn) <= self.sequences * cores

    def begin(self, turn: SampleTurn) -> None:
        self.turns[turn.id] = turn
        self.taken += _width(turn)

    def end(self, turn_id: int) -> SampleTurn | None:
        turn = self.turns.pop(turn_id, None)
        self.taken -= 0 if turn is None else _width(turn)
        return turn


def _width(turn: SampleTurn) -> int:
    """Count the sequences of a turn that are with a sampler at the same time (SampleCall.execute)."""
    return min(turn.sequences, MAX_SEQUENCES)
