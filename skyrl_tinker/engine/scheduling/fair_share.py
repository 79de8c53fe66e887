"""Start-time fair queueing, of trainer time and of samples: over owners, their sessions, and their models.

P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996, in a hierarchy: each waiting member of
a level has a tag, the virtual time at which its next work starts, and the lowest tag is served first. The
cost of a unit advances the tags of all its members. The virtual time of a level is the lowest tag that waited
there when the last unit was chosen.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from skyrl_tinker.domain.ids import ModelKey, OwnerId, SessionId


class Waiter(Protocol):
    """A request that waits. `model_key`: None if all requests of its session share a queue, as samples do."""

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
"""An owner, a session of this owner, and perhaps a model of this session."""
Cost = Callable[[W], float]
STALE = 4
"""Number of places beyond twice a level's members at which stale places are dropped."""


def path_of(row: Waiter) -> Path:
    """Return the path of the queue in which a row waits."""
    above = row.owner_id, row.session_id
    return above if row.model_key is None else (*above, row.model_key)


def _whole(rows: Collection[W]) -> Iterable[W]:
    return rows


@dataclass(slots=True, eq=False)
class _Node(Generic[W]):
    """An owner, session or model in its level, with rows if it is a queue, else with the level below it."""

    level: "_Node[W] | None" = None
    key: object = None
    depth: int = 0
    tag: float = 0.0
    place: "_Place[W] | None" = None  # in its level; None: nothing waits in it
    rows: Collection[W] = ()
    below: "dict[object, _Node[W]]" = field(default_factory=dict)  # members that wait or are ahead
    places: "list[_Place[W]]" = field(default_factory=list)  # a heap; a place is valid while its node has it
    left: "list[tuple[float, int, _Node[W]]]" = field(default_factory=list)  # a heap: members not waiting
    clock: float = 0.0  # virtual time of the level below
    before: float = 0.0  # `clock` one choice earlier
    choice: int = 0  # number of the choice of `clock`

    def first(self) -> "_Place[W] | None":
        """Return the first place in the level below; None: nothing waits there."""
        while self.places and self.places[0] is not self.places[0][3].place:
            heappop(self.places)
        return self.places[0] if self.places else None


_Place = tuple[float, int, int, _Node[W]]
"""(tag, id of the next row, number of the place, its node)."""


class FairShare(Generic[W]):
    """Fair shares in virtual time; its unit is that of the costs: trainer seconds or sampler tokens.

    - A newcomer starts at the virtual time of its level. So does a member that returns after the others have
      caught up with it: idle time gives no credit, and a debt lasts while others wait.
    - A change costs the logarithm of the number of waiting members, and so does each row of the order.
    - Changed nodes get their places together, at the next call for the order: most of them change several
      times between two choices.
    - A queue has rows that wait for each other, in order. A cost is an estimate.
    """

    def __init__(self) -> None:
        self._root: _Node[W] = _Node()
        self._choice = 0
        self._numbers = itertools.count()
        self._charged: dict[_Node[W], float] = {}  # tags before the last charge
        self._moved: dict[_Node[W], None] = {}  # nodes whose places may have changed

    def clear(self) -> None:
        """Forget all shares; for when nothing waits."""
        self._root, self._charged, self._moved = _Node(), {}, {}

    def put(self, path: Path, rows: Collection[W]) -> None:
        """Replace the rows of a queue by these; call it again after each change of them."""
        nodes = self._walk(path)
        nodes[-1].rows = rows
        for node in nodes:
            self._moved[node] = None

    def choose(self) -> None:
        """Begin a choice: virtual times are now those of the members that wait."""
        self._set_places()
        self._choice += 1

    def order(self, cost: Cost[W], part: Callable[[Collection[W]], Iterable[W]] = _whole) -> Iterator[W]:
        """Yield the rows in the order of their virtual start, ties by age.

        `part`: selects the rows of a queue that count. Nothing may be put or charged before the iterator is
        dropped.
        """
        self._set_places()
        return _merged(self._root, cost, part)

    def first(self, of: Iterable[Path] | None = None) -> W | None:
        """Return the first row, None if nothing waits. `of`: the only sessions to consider; they wait."""
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
        """Count the costs of rows, `instead` of the last ones counted.

        Rows after the first of a queue may have another owner, if its session was given to one meanwhile.
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
        """Return how much more an owner, session or model has had than the least served one in its level."""
        if self._moved:
            self._set_places()
        most, level = 0.0, self._root
        for key in path:
            node = level.below[key]
            if len(level.places) > 1:  # else it is the only one
                first = level.first()
                assert first is not None, "it waits, and so does the first"
                most = max(most, node.tag - first[0])
            level = node
        return most

    def _walk(self, path: Path) -> list[_Node[W]]:
        """Return the nodes of a path, with their tags as of the last choice."""
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
        """Update the virtual time of a level to the last choice, before any change in it."""
        first = level.first()
        clock = level.clock if first is None else max(level.clock, first[0])
        level.before = level.clock if level.choice == self._choice - 1 else clock
        level.clock, level.choice = clock, self._choice
        while level.left and level.left[0][0] <= level.before:
            tag, _, node = heappop(level.left)
            if node.place is None and node.tag == tag and level.below.get(node.key) is node:
                del level.below[node.key]

    def _set_places(self) -> None:
        """Give changed nodes their places, from the lowest levels up."""
        for node in sorted(self._moved, key=attrgetter("depth"), reverse=True):
            self._set_place(node)
        self._moved.clear()

    def _set_place(self, node: _Node[W]) -> None:
        """Give a node the place of its tag and its next row."""
        level, had = node.level, node.place
        assert level is not None, "only the root has none"
        if node.rows:
            head = next(iter(node.rows)).id
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
    return next(iter(node.rows))


def _merged(level: _Node[W], cost: Cost[W], part: Callable[[Collection[W]], Iterable[W]]) -> Iterator[W]:
    """Yield the rows below, while nothing changes. A node is not visited before its place is reached."""
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
