"""Start-time fair queueing, of trainer time and of samples: over owners, their sessions, and their models.

P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996, in a hierarchy: who waits has a tag,
the virtual time at which its next work starts, and the lowest tag is served first. What a unit took moves the
tags of all that were in it. The virtual time of a level is the lowest tag of those that waited there when the
last unit was chosen.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from skyrl_tinker.domain.ids import ModelKey, OwnerId, SessionId


class Waiter(Protocol):
    """A request that waits. `model_key`: None where all of its session wait for each other, as samples do."""

    @property
    def id(self) -> int: ...
    @property
    def owner_id(self) -> OwnerId | None: ...
    @property
    def session_id(self) -> SessionId: ...
    @property
    def model_key(self) -> ModelKey | None: ...


W = TypeVar("W", bound=Waiter)
Path = tuple[OwnerId | SessionId | ModelKey | None, ...]
"""An owner, then a session of it, then perhaps a model of that."""
Cost = Callable[[W], float]
STALE = 4
"""Places of a level, beyond twice its members, at which those that no longer hold are dropped."""


def path_of(row: Waiter) -> Path:
    """Return the path of the queue in which a row waits."""
    above = row.owner_id, row.session_id
    return above if row.model_key is None else (*above, row.model_key)


def _whole(rows: Sequence[W]) -> Iterable[W]:
    return rows


@dataclass(slots=True, eq=False)
class _Node(Generic[W]):
    """An owner, session or model in its level: its rows if it is a queue, the level below it if it is not."""

    level: "_Node[W] | None" = None
    key: object = None
    depth: int = 0
    tag: float = 0.0
    place: "_Place[W] | None" = None  # in its level; None: nothing of it waits
    rows: Sequence[W] = ()
    below: "dict[object, _Node[W]]" = field(default_factory=dict)  # who waits, or has had more
    places: "list[_Place[W]]" = field(default_factory=list)  # a heap; one holds if its node has it still
    left: "list[tuple[float, int, _Node[W]]]" = field(default_factory=list)  # a heap of who does not wait
    clock: float = 0.0  # virtual time of the level below
    before: float = 0.0  # the same, a choice earlier
    choice: int = 0  # for which `clock` holds

    def first(self) -> "_Place[W] | None":
        """Return the first place in the level below; None: nothing waits there."""
        while self.places and self.places[0] is not self.places[0][3].place:
            heappop(self.places)
        return self.places[0] if self.places else None


_Place = tuple[float, int, int, _Node[W]]
"""Tag, id of the next row, number of the place, whose it is."""


class FairShare(Generic[W]):
    """Virtual times in what is shared: seconds of the trainer, tokens of the samplers.

    A newcomer starts at the virtual time of its level, and so does who comes back once the others had as much
    as it had: nobody saves up, and a debt lasts while others wait. A change costs the logarithm of those that
    wait, and so does each row that is taken from the order. Nodes that change get their places together, when
    the order is asked for next: between two choices most of them change several times.

    A queue is of rows that wait for each other, in order; a cost is an estimate.
    """

    def __init__(self) -> None:
        self._root: _Node[W] = _Node()
        self._choice = 0
        self._numbers = itertools.count()
        self._charged: dict[_Node[W], float] = {}  # tags before the last charge
        self._moved: dict[_Node[W], None] = {}  # whose places may have changed

    def clear(self) -> None:
        """Forget who had what; for when nothing waits."""
        self._root, self._charged, self._moved = _Node(), {}, {}

    def put(self, path: Path, rows: Sequence[W]) -> None:
        """Have these rows wait in a queue, in place of those that did; call it again once they change."""
        nodes = self._walk(path)
        nodes[-1].rows = rows
        for node in nodes:
            self._moved[node] = None

    def choose(self) -> None:
        """Begin a choice: the virtual time is that of those that wait now."""
        self._set_places()
        self._choice += 1

    def order(self, cost: Cost[W], part: Callable[[Sequence[W]], Iterable[W]] = _whole) -> Iterator[W]:
        """Yield the rows in the order of their virtual start, the older one first where those are equal.

        `part`: of a queue's rows, those that count. Nothing may be put or charged before the iterator is
        dropped.
        """
        self._set_places()
        return _merged(self._root, cost, part)

    def first(self, of: Iterable[Path] | None = None) -> W | None:
        """Return the first row, None if nothing waits. `of`: sessions that wait; no other counts."""
        self._set_places()
        if of is None:
            place = self._root.first()
            return None if place is None else _head(place[3])
        best: dict[_Node[W], _Place[W]] = {}  # by owner
        for owner, session in of:
            above = self._root.below[owner]
            place = above.below[session].place
            if place is not None and (above not in best or place < best[above]):
                best[above] = place
        owners = ((above.tag, place[1], place[3]) for above, place in best.items())
        return min(((tag, head, _head(node)) for tag, head, node in owners), default=(0.0, 0, None))[2]

    def charge(self, costs: Iterable[tuple[W, float]], *, instead: bool = False) -> None:
        """Count what rows took, `instead` of what was counted last.

        Rows behind the first of a queue may have another owner, to whom its session was given meanwhile.
        """
        last, charged = self._charged if instead else {}, dict[_Node[W], float]()
        for node, tag in last.items():
            node.tag = tag
        for row, taken in costs:
            for node in self._walk(path_of(row)):
                if node not in charged:
                    charged[node] = node.tag
                node.tag += taken
        self._charged = charged
        self._moved |= dict.fromkeys(last) | dict.fromkeys(charged)

    def ahead(self, path: Path) -> float:
        """Return how much more an owner, session or model had than the one that had least beside it."""
        if self._moved:
            self._set_places()
        most, level = 0.0, self._root
        for key in path:
            node = level.below[key]
            if len(level.places) > 1:  # else it is the first itself
                first = level.first()
                assert first is not None, "it waits, and so does the first"
                most = max(most, node.tag - first[0])
            level = node
        return most

    def _walk(self, path: Path) -> list[_Node[W]]:
        """Return the nodes of a path, with what they have had as of the last choice."""
        level, nodes = self._root, []
        for key in path:
            if level.choice != self._choice:
                self._settle(level)
            node = level.below.get(key)
            if node is None:
                node = level.below[key] = _Node(level, key, level.depth + 1, level.clock)
            elif node.place is None and node.tag < level.clock:
                node.tag = level.clock
            nodes.append(node)
            level = node
        return nodes

    def _settle(self, level: _Node[W]) -> None:
        """Bring the virtual time of a level up to the last choice, before anything changes in it."""
        first = level.first()
        clock = level.clock if first is None else max(level.clock, first[0])
        level.before = level.clock if level.choice == self._choice - 1 else clock
        level.clock, level.choice = clock, self._choice
        while level.left and level.left[0][0] <= level.before:
            tag, _, node = heappop(level.left)
            if node.place is None and node.tag == tag and level.below.get(node.key) is node:
                del level.below[node.key]

    def _set_places(self) -> None:
        """Give the nodes that have moved their places, from the lowest levels up."""
        for node in sorted(self._moved, key=attrgetter("depth"), reverse=True):
            self._set_place(node)
        self._moved.clear()

    def _set_place(self, node: _Node[W]) -> None:
        """Give a node the place that its tag and its next row say."""
        level, had = node.level, node.place
        assert level is not None, "only the root has none"
        if node.rows:
            head = node.rows[0].id
        elif (first := node.first()) is not None:
            head = first[1]
        else:
            node.place = None
            heappush(level.left, (node.tag, next(self._numbers), node))
            return
        if had is None or had[0] != node.tag or had[1] != head:
            place = node.place = node.tag, head, next(self._numbers), node
            if level.places and level.places[0] is had:
                heapreplace(level.places, place)
                return
            heappush(level.places, place)
            if len(level.places) > 2 * len(level.below) + STALE:
                level.places = [each for each in level.places if each is each[3].place]
                heapify(level.places)


_NOTHING: Iterator[Any] = iter(())


def _head(node: _Node[W]) -> W:
    while not node.rows:
        place = node.first()
        assert place is not None, "it has a place, so something waits"
        node = place[3]
    return node.rows[0]


def _merged(level: _Node[W], cost: Cost[W], part: Callable[[Sequence[W]], Iterable[W]]) -> Iterator[W]:
    """Yield the rows below, while nothing changes; of a node nothing is looked at before its place comes."""
    level.first()
    places = level.places
    ahead = [(*place[:2], 0, None, _NOTHING) for place in places[:1]]  # a heap; ids differ, but of a place
    while ahead:
        start, _, number, row, rows = heappop(ahead)
        if row is None:
            for child in (2 * number + 1, 2 * number + 2):  # in the heap of places
                if child < len(places):
                    heappush(ahead, (*places[child][:2], child, None, _NOTHING))
            node = places[number][3]
            if node.place is not places[number]:
                continue
            while len(node.places) == 1:  # nothing is to be merged
                node = node.places[0][3]
            rows = iter(part(node.rows)) if node.rows else _merged(node, cost, part)
            if (row := next(rows, None)) is None:
                continue
            if ahead and (start, row.id) > ahead[0][:2]:
                heappush(ahead, (start, row.id, number, row, rows))
                continue
        yield row
        if (following := next(rows, None)) is not None:
            heappush(ahead, (start + cost(row), following.id, number, following, rows))
