"""Start-time fair queueing of trainer time: over owners, over the sessions of each, over their models.

P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996, in a hierarchy: who waits has a tag,
the virtual time at which its next work starts, and the lowest tag is served first. What a unit took moves the
tags of all that were in it. The virtual time of a level is the lowest tag of those that waited there when the
last unit was chosen.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge

from skyrl_tinker.domain.ids import ModelKey, OwnerId, SessionId
from skyrl_tinker.engine.scheduling.lanes import model_of
from skyrl_tinker.store.futures.queue import QueuedRow

Waiting = Mapping[ModelKey, Sequence[QueuedRow]]
"""Runnable rows of each model, in order; never empty."""
Path = tuple[OwnerId | SessionId | ModelKey | None, ...]
"""An owner, a session of it, or a model of that; empty: all owners."""
Seconds = Callable[[QueuedRow], float]
"""Estimate of the trainer time that a row takes."""


@dataclass(frozen=True, slots=True)
class FairShare:
    """Virtual times in seconds of trainer time, carried from unit to unit.

    A newcomer starts at the virtual time of its level, and so does who comes back once the others had as much
    as it had: nobody saves up, and a debt lasts while others wait. When nothing waits, all is forgotten.
    """

    tags: Mapping[Path, float] = field(default_factory=dict)
    clocks: Mapping[Path, float] = field(
        default_factory=dict
    )  # virtual times of the levels below these paths

    def joined_by(self, waiting: Waiting) -> "FairShare":
        """Return the tags of those that wait, and of others that had more than those; then the time."""
        present = {path for rows in waiting.values() for path in _paths(rows[0])}
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

    def order(self, waiting: Waiting, seconds: Seconds) -> Iterator[QueuedRow]:
        """Yield all rows in the order of their virtual start, the older one first where those are equal."""
        return self._merged((), list(waiting.values()), seconds)

    def charged(self, seconds: Iterable[tuple[QueuedRow, float]]) -> "FairShare":
        """Return the tags after these rows took these seconds."""
        tags = dict(self.tags)
        for row, taken in seconds:
            for path in _paths(row):
                tags[path] += taken
        return FairShare(tags, self.clocks)

    def ahead_s(self, row: QueuedRow) -> float:
        """Return how much more its owner, session or model had than the one that had least beside it."""
        return max(self.tags[path] - self.clocks[path[:-1]] for path in _paths(row))

    def _merged(
        self, above: Path, lanes: Sequence[Sequence[QueuedRow]], seconds: Seconds
    ) -> Iterator[QueuedRow]:
        groups: defaultdict[Path, list[Sequence[QueuedRow]]] = defaultdict(list)
        for rows in lanes:
            groups[_paths(rows[0])[len(above)]].append(rows)
        tagged = (
            _tagged(self.tags[path], self._below(path, group, seconds), seconds)
            for path, group in groups.items()
        )
        return (row for _, _, row in merge(*tagged))

    def _below(
        self, path: Path, lanes: Sequence[Sequence[QueuedRow]], seconds: Seconds
    ) -> Iterable[QueuedRow]:
        return lanes[0] if path == _paths(lanes[0][0])[-1] else self._merged(path, lanes, seconds)


def _paths(row: QueuedRow) -> tuple[Path, Path, Path]:
    owner, session = row.owner_id, row.session_id
    return (owner,), (owner, session), (owner, session, model_of(row))


def _tagged(
    start: float, rows: Iterable[QueuedRow], seconds: Seconds
) -> Iterator[tuple[float, int, QueuedRow]]:
    """Tag each row with its virtual start."""
    for row in rows:
        yield start, row.id, row  # ids differ: rows are never compared
        start += seconds(row)
