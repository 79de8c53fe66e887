"""Rows of even cost for ranks that run them in step: for GPUs. Plain Python, the same on all ranks.

The segments of a row depend on the whole pass, and so does the rounding of a request's gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapreplace


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """FLOP of a sequence of L tokens: per_token * L + per_pair * L^2."""

    per_token: int
    per_pair: int

    def of(self, length: int) -> int:
        return (self.per_token + self.per_pair * length) * length


def even_rows(
    lengths: Mapping[int, int], cost: SequenceCost, world: int, budget: int
) -> list[list[tuple[int, ...]]]:
    """Return the rows of each rank; `lengths`: tokens by segment.

    Segments go to ranks by longest processing time first: the ranks' costs differ by one segment at most.
    First-fit decreasing packs a rank's segments into rows of `budget` tokens (a longer one has its own row).
    The k-th rows of all ranks run together, so each rank starts with its costliest row.
    """
    loads = [(0, rank) for rank in range(world)]  # a heap
    rows: list[list[list[int]]] = [[] for _ in loads]
    left: list[list[int]] = [[] for _ in loads]  # tokens, by row
    for segment in sorted(lengths, key=lambda segment: (-lengths[segment], segment)):
        length = lengths[segment]
        load, rank = loads[0]
        heapreplace(loads, (load + cost.of(length), rank))
        number = next((number for number, room in enumerate(left[rank]) if length <= room), None)
        if number is None:
            rows[rank].append([segment])
            left[rank].append(budget - length)
        else:
            rows[rank][number].append(segment)
            left[rank][number] -= length

    def falling(row: tuple[int, ...]) -> int:
        return -sum(cost.of(lengths[segment]) for segment in row)

    return [sorted((tuple(sorted(row)) for row in share), key=falling) for share in rows]
