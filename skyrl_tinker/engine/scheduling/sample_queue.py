"""Queue of waiting samples, shared fairly by their tokens, so that no owner or session delays others."""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from skyrl_tinker.engine.scheduling.fair_share import FairShare, Path, path_of
from skyrl_tinker.engine.scheduling.slots import SampleTurn, Slots, width
from skyrl_tinker.protocol.queue_views import LISTED, SHOWN, QueueView, SamplingView

_TOKENS = attrgetter("tokens")


class SampleQueue:
    """Start-time fair queueing over owners and their sessions; first in, first out within each session.

    To drop a turn costs no more than to take one: a crowd of clients may give up at once.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._queues: dict[Path, OrderedDict[int, SampleTurn]] = {}  # by id
        self._paths: dict[int, Path] = {}  # of all that wait
        self._shares: FairShare[SampleTurn] = FairShare()
        self._newcomers: dict[Path, int] = {}  # sequences of their next turns
        self._widths: Counter[int] = Counter()  # of these, without zeros

    def __len__(self) -> int:
        return len(self._paths)

    def in_flight(self) -> int:
        """Count the turns that were taken and not released."""
        return len(self._slots)

    def add(self, turns: Sequence[SampleTurn]) -> None:
        """Append turns to the queues of their sessions."""
        for turn in turns:
            path = self._paths[turn.id] = path_of(turn)
            if path in self._queues:
                self._queues[path][turn.id] = turn
            else:
                self._queues[path] = OrderedDict({turn.id: turn})
                self._shares.put(path, self._queues[path].values())
                self._note(path)

    def take(self, most: int) -> list[SampleTurn]:
        """Remove and return the next turns that may begin, at most `most`; `release` ends each."""
        self._shares.choose()
        turns = list(islice(self._beginning(), most))
        for turn in turns:
            self._remove(turn.id)
        if self._queues:
            self._shares.charge((turn, turn.tokens) for turn in turns)
        else:  # shares do not matter once nothing waits
            self._shares.clear()
        return turns

    def release(self, turn_ids: Iterable[int]) -> None:
        """End these turns; those that are not in flight are ignored."""
        for each in turn_ids:
            if path := self._slots.release(each):
                self._note(path)

    def discard(self, ids: Iterable[int]) -> None:
        """Remove the waiting turns with these ids; ids that do not wait are ignored."""
        for path in {self._remove(each) for each in ids if each in self._paths}:
            self._shares.put(path, self._queues.get(path, OrderedDict()).values())
            self._note(path)

    def view(self, away: Collection[int] = ()) -> SamplingView:
        """Return the queues of the first sessions, in order, and the counts of waiting and running turns.

        `away`: turns to leave out: they have run before, so later ids may belong to running samples.
        """
        stride = max(1, math.ceil(len(self) / SHOWN))
        queues: dict[str, QueueView] = {}
        for turn in self._shares.order(_TOKENS, _head):
            queue, of_session = self._queues[path_of(turn)].values(), str(turn.session_id)
            shown = [each for each in queue if each.id not in away] if away else queue
            if not shown:
                continue
            others = queues.get(of_session, QueueView((), 0))  # of an owner that gave its session away
            if len(queues) == LISTED and of_session not in queues:
                return SamplingView(queues, stride, self._slots.turns(), len(self), self.in_flight())
            ids = sorted((*others.ids, *(each.id for each in islice(shown, 0, None, stride))))
            queues[of_session] = QueueView(tuple(ids), others.waiting + len(shown))
        return SamplingView(queues, stride, None, len(self), self.in_flight())

    def _beginning(self) -> Iterator[SampleTurn]:
        """Yield turns in order while there is room for the next, then turns of newcomers for the reserve."""
        for turn in self._shares.order(_TOKENS):
            if not (self._slots.take(turn) or self._slots.take_reserved(turn)):
                break
            self._note(path_of(turn))
            yield turn
        if self._reserve_is_full():
            return  # usual under load: else each turn that ends would cost a walk over all sessions
        for turn in self._shares.order(_TOKENS, self._newcomer):
            if self._slots.take_reserved(turn):
                self._note(path_of(turn))
                yield turn
                if self._reserve_is_full():
                    return

    def _reserve_is_full(self) -> bool:
        """Return whether no newcomer's next turn fits in the reserve."""
        return self._slots.reserve_left() < min(self._widths, default=math.inf)

    def _newcomer(self, queue: Collection[SampleTurn]) -> Sequence[SampleTurn]:
        (head,) = _head(queue)
        return () if self._slots.knows(head) else (head,)

    def _note(self, path: Path) -> None:
        """Update whether a session is a newcomer, after its first turn or its turns in flight changed."""
        if had := self._newcomers.pop(path, 0):
            self._widths[had] -= 1
            if not self._widths[had]:
                del self._widths[had]
        queue = self._queues.get(path)
        if queue and (heads := self._newcomer(queue.values())):
            self._newcomers[path] = width(heads[0])
            self._widths[self._newcomers[path]] += 1

    def _remove(self, turn_id: int) -> Path:
        path = self._paths.pop(turn_id)
        del self._queues[path][turn_id]
        if not self._queues[path]:
            del self._queues[path]
        return path


def _head(queue: Collection[SampleTurn]) -> Sequence[SampleTurn]:
    return (next(iter(queue)),)
