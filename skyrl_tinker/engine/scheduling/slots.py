"""Sequences that the samplers work on, and who may add to them."""

from collections import Counter
from collections.abc import Callable
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
    """Turns in flight. Beyond what all share, a reserve is for sessions that have nothing in flight.

    Samples that begin together end together: a newcomer might wait for as long as the longest of them takes.
    """

    def __init__(self, sequences: int, replicas: Callable[[], int]) -> None:
        """`sequences`: per replica, that all share."""
        self._shared = sequences
        self._replicas = replicas
        self._turns: dict[int, SampleTurn] = {}  # by id
        self._sequences = 0
        self._of_session: Counter[tuple[OwnerId | None, SessionId]] = Counter()  # turns in flight

    def __len__(self) -> int:
        """Count the turns in flight."""
        return len(self._turns)

    def take(self, turn: SampleTurn) -> bool:
        """Begin a turn where it fits; one that is larger than all there is begins alone."""
        most = self._shared
        if not self.knows(turn):
            most += RESERVED_SEQUENCES
        if self._turns and self._sequences + _width(turn) > most * self._replicas():
            return False
        self._turns[turn.id] = turn
        self._sequences += _width(turn)
        self._of_session[turn.owner_id, turn.session_id] += 1
        return True

    def knows(self, turn: SampleTurn) -> bool:
        """Return whether its session has turns in flight."""
        return self._of_session[turn.owner_id, turn.session_id] > 0

    def release(self, turn_id: int) -> None:
        """End a turn; one that is not in flight is ignored."""
        turn = self._turns.pop(turn_id, None)
        if turn is not None:
            self._sequences -= _width(turn)
            self._of_session -= Counter([(turn.owner_id, turn.session_id)])  # drops zeros


def _width(turn: SampleTurn) -> int:
    """Count the sequences of a turn that are with a sampler at the same time (SampleCall.execute)."""
    return min(turn.sequences, MAX_SEQUENCES)
