"""Queue of waiting samples, shared fairly by their tokens, so that no owner or session delays others."""

import math
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from itertools import islice

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.engine.scheduling.fair_share import FairShare
from skyrl_tinker.engine.scheduling.slots import SampleTurn, Slots
from skyrl_tinker.protocol.queue_views import SHOWN, QueueView


class SampleQueue:
    """Start-time fair queueing over owners and their sessions; first in, first out within each session."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._queues: dict[SessionId, deque[SampleTurn]] = {}
        self._count = 0
        self._shares: FairShare[SampleTurn] = FairShare()

    def __len__(self) -> int:
        return self._count

    def in_flight(self) -> int:
        """Count the turns that were taken and not released."""
        return len(self._slots)

    def add(self, turns: Sequence[SampleTurn]) -> None:
        """Append turns behind those of their sessions."""
        for turn in turns:
            self._queues.setdefault(turn.session_id, deque()).append(turn)
        self._count += len(turns)

    def take(self, most: int) -> list[SampleTurn]:
        """Remove and return the next turns that may begin, at most so many; `release` ends each."""
        self._shares = self._shares.joined_by(self._queues.values())
        turns = list(islice(self._beginning(), most))
        for turn in turns:
            self._queues[turn.session_id].popleft()
        self._count -= len(turns)
        self._queues = {session: queue for session, queue in self._queues.items() if queue}
        # who had what does not matter once nobody waits
        self._shares = (
            self._shares.charged((turn, turn.tokens) for turn in turns) if self._queues else FairShare()
        )
        return turns

    def release(self, turn_ids: Iterable[int]) -> None:
        """End these turns; those that are not in flight are ignored."""
        for each in turn_ids:
            self._slots.release(each)

    def discard(self, ids: Container[int]) -> None:
        """Remove the waiting turns with these ids; ids that do not wait are ignored."""
        for session, queue in list(self._queues.items()):
            kept = deque(turn for turn in queue if turn.id not in ids)
            self._count -= len(queue) - len(kept)
            if kept:
                self._queues[session] = kept
            else:
                del self._queues[session]

    def view(self) -> tuple[dict[str, QueueView], int]:
        """Return the queues by session, the next one first, and the stride: one turn in so many is shown."""
        stride = max(1, math.ceil(self._count / SHOWN))
        shares = self._shares.joined_by(self._queues.values())
        first = shares.order(_heads(self._queues.values()), _tokens)
        queues = {str(turn.session_id): _view(self._queues[turn.session_id], stride) for turn in first}
        return queues, stride

    def _beginning(self) -> Iterator[SampleTurn]:
        """Yield turns in order while there is room for the next, and then those that the reserve is for."""
        queues = self._queues.values()
        for turn in self._shares.order(queues, _tokens):
            if not (self._slots.take(turn) or self._slots.take_reserved(turn)):
                break
            yield turn
        newcomers = [queue for queue in queues if not self._slots.knows(queue[0])]
        for turn in self._shares.order(_heads(newcomers), _tokens):
            if self._slots.take_reserved(turn):
                yield turn


def _heads(queues: Collection[deque[SampleTurn]]) -> list[list[SampleTurn]]:
    return [[queue[0]] for queue in queues]


def _tokens(turn: SampleTurn) -> float:
    return turn.tokens


def _view(queue: deque[SampleTurn], stride: int) -> QueueView:
    return QueueView(tuple(turn.id for turn in islice(queue, 0, None, stride)), len(queue))
