"""Start-time fair queueing as its definition says it: all tags are computed again at each choice."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge

from skyrl_tinker.engine.scheduling.fair_share import Path, path_of
from skyrl_tinker.store.futures.queue import QueuedRow

Cost = Callable[[QueuedRow], float]


@dataclass(frozen=True)
class RebuiltShares:
    """Tags by path, and virtual times of the levels below paths."""

    tags: Mapping[Path, float] = field(default_factory=dict)
    clocks: Mapping[Path, float] = field(default_factory=dict)

    def joined_by(self, queues: Collection[Sequence[QueuedRow]]) -> "RebuiltShares":
        """With the tags of those that wait, and of others that had more than those; then the time."""
        present = {path for rows in queues for path in _above(rows[0])}
        kept: dict[Path, float] = {(): 0.0}
        for path in sorted(present | self.tags.keys(), key=len):
            clock = self.clocks.get(path[:-1], 0.0)
            tag = self.tags.get(path, clock)
            if path in present or (path[:-1] in kept and tag > clock):
                kept[path] = max(tag, clock)
        clocks = {path: clock for path, clock in self.clocks.items() if path in kept}
        for path in sorted(present, key=lambda each: -kept[each]):
            clocks[path[:-1]] = kept[path]  # the lowest comes last
        return RebuiltShares(kept, clocks)

    def order(self, queues: Collection[Sequence[QueuedRow]], cost: Cost) -> Iterator[QueuedRow]:
        return self._merged(0, queues, cost)

    def charged(self, costs: Iterable[tuple[QueuedRow, float]]) -> "RebuiltShares":
        tags = dict(self.tags)
        for row, taken in costs:
            for path in _above(row):
                tags[path] = tags.get(path, self.clocks.get(path[:-1], 0.0)) + taken
        return RebuiltShares(tags, self.clocks)

    def ahead(self, row: QueuedRow) -> float:
        return max(self.tags[path] - self.clocks[path[:-1]] for path in _above(row))

    def _merged(self, depth: int, queues: Collection[Sequence[QueuedRow]], cost: Cost) -> Iterator[QueuedRow]:
        groups: defaultdict[Path, list[Sequence[QueuedRow]]] = defaultdict(list)
        for rows in queues:
            groups[_above(rows[0])[depth]].append(rows)
        tagged = (
            _tagged(self.tags[path], self._below(path, group, cost), cost) for path, group in groups.items()
        )
        return (row for _, _, row in merge(*tagged))

    def _below(self, path: Path, queues: list[Sequence[QueuedRow]], cost: Cost) -> Iterable[QueuedRow]:
        whole = path == path_of(queues[0][0])
        return queues[0] if whole else self._merged(len(path), queues, cost)


def _above(row: QueuedRow) -> list[Path]:
    path = path_of(row)
    return [path[: depth + 1] for depth in range(len(path))]


def _tagged(start: float, rows: Iterable[QueuedRow], cost: Cost) -> Iterator[tuple[float, int, QueuedRow]]:
    for row in rows:
        yield start, row.id, row
        start += cost(row)
