"""Start-time fair queueing, of trainer time and of samples: over owners, their sessions, and their models.

P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996, in a hierarchy: who waits has a tag,
the virtual time at which its next work starts, and the lowest tag is served first. What a unit took moves the
tags of all that were in it. The virtual time of a level is the lowest tag of those that waited there when the
last unit was chosen.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import Generic, Protocol, TypeVar

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
"""An owner, a session of it, or a model of that; empty: all owners."""


@dataclass(frozen=True, slots=True)
class FairShare(Generic[W]):
    """Virtual times in what is shared: seconds of the trainer, tokens of the samplers.

    A newcomer starts at the virtual time of its level, and so does who comes back once the others had as much
    as it had: nobody saves up, and a debt lasts while others wait. When nothing waits, all is forgotten.

    Queues are of those that wait for each other, in order, and never empty; a cost is an estimate.
    """

    tags: Mapping[Path, float] = field(default_factory=dict)
    clocks: Mapping[Path, float] = field(
        default_factory=dict
    )  # virtual times of the levels below these paths

    def joined_by(self, queues: Collection[Sequence[W]]) -> "FairShare[W]":
        """Return the tags of those that wait, and of others that had more than those; then the time."""
        present = {path for rows in queues for path in _paths(rows[0])}
        kept: dict[Path, float] = {(): 0.0}
        for path in sorted(present | self.tags.keys(), key=len):
            clock = self.clocks.get(path[:-1], 0.0)
            tag = self.tags.get(path, clock)
            if path in present or (path[:-1] in kept and tag > clock):
                kept[path] = max(tag, clock)
        clocks = {path: clock for path, clock in self.clocks.items() if path in kept}
        for path in sorted(present, key=lambda each: -kept[each]):
            clocks[path[:-1]] = kept[path]  # the lowest comes last
        del kept[()]
        return FairShare(kept, clocks)

    def order(self, queues: Collection[Sequence[W]], cost: Callable[[W], float]) -> Iterator[W]:
        """Yield all rows in the order of their virtual start, the older one first where those are equal."""
        return self._merged((), queues, cost)

    def charged(self, costs: Iterable[tuple[W, float]]) -> "FairShare[W]":
        """Return the tags after these rows took so much.

        Rows behind the first of a queue may have another owner, to whom its session was given meanwhile.
        """
        tags = dict(self.tags)
        for row, taken in costs:
            for path in _paths(row):
                tags[path] = tags.get(path, self.clocks.get(path[:-1], 0.0)) + taken
        return FairShare(tags, self.clocks)

    def ahead(self, row: W) -> float:
        """Return how much more its owner, session or model had than the one that had least beside it."""
        return max(self.tags[path] - self.clocks[path[:-1]] for path in _paths(row))

    def _merged(
        self, above: Path, queues: Collection[Sequence[W]], cost: Callable[[W], float]
    ) -> Iterator[W]:
        groups: defaultdict[Path, list[Sequence[W]]] = defaultdict(list)
        for rows in queues:
            groups[_paths(rows[0])[len(above)]].append(rows)
        tagged = (
            _tagged(self.tags[path], self._below(path, group, cost), cost) for path, group in groups.items()
        )
        return (row for _, _, row in merge(*tagged))

    def _below(self, path: Path, queues: list[Sequence[W]], cost: Callable[[W], float]) -> Iterable[W]:
        return queues[0] if path == _paths(queues[0][0])[-1] else self._merged(path, queues, cost)


def _paths(row: Waiter) -> tuple[Path, ...]:
    owner, session = row.owner_id, row.session_id
    above = (owner,), (owner, session)
    return above if row.model_key is None else (*above, (owner, session, row.model_key))


def _tagged(start: float, rows: Iterable[W], cost: Callable[[W], float]) -> Iterator[tuple[float, int, W]]:
    """Tag each row with its virtual start."""
    for row in rows:
        yield start, row.id, row  # ids differ: rows are never compared
        start += cost(row)
