"""Rows for ranks in step: nothing left out, few of them, of even cost."""

import random

from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.training.batching.even_rows import SequenceCost, even_rows

LENGTHS = st.dictionaries(st.integers(0, 10**6), st.integers(1, 300), max_size=60)
COSTS = st.builds(SequenceCost, st.integers(1, 10**11), st.integers(0, 10**9))
WORLDS = st.integers(1, 8)


@given(lengths=LENGTHS, cost=COSTS, world=WORLDS, budget=st.integers(1, 500))
def test_each_segment_is_in_one_row_within_the_budget(
    lengths: dict[int, int], cost: SequenceCost, world: int, budget: int
) -> None:
    plan = even_rows(lengths, cost, world, budget)
    assert len(plan) == world
    rows = [row for share in plan for row in share]
    assert sorted(segment for row in rows for segment in row) == sorted(lengths)
    for row in rows:
        assert list(row) == sorted(row)  # the requests of a row, and its models, stay contiguous
        assert len(row) == 1 or sum(lengths[segment] for segment in row) <= budget


@given(lengths=LENGTHS, cost=COSTS, world=WORLDS, budget=st.integers(1, 500))
def test_ranks_differ_by_one_segment_and_run_rows_of_like_cost_together(
    lengths: dict[int, int], cost: SequenceCost, world: int, budget: int
) -> None:
    plan = even_rows(lengths, cost, world, budget)
    costs = [[sum(cost.of(lengths[segment]) for segment in row) for row in share] for share in plan]
    totals = [sum(each) for each in costs]
    assert max(totals) - min(totals) <= max(map(cost.of, lengths.values()), default=0)
    assert all(each == sorted(each, reverse=True) for each in costs)


@given(lengths=st.lists(st.integers(1, 100), max_size=8), cost=COSTS)
def test_rows_are_few(lengths: list[int], cost: SequenceCost) -> None:
    """First-fit decreasing's bound: 11/9 of the fewest that there can be, and 6/9 (Dósa 2007)."""
    (rows,) = even_rows(dict(enumerate(lengths)), cost, 1, 100)
    assert 9 * len(rows) <= 11 * _fewest(sorted(lengths, reverse=True), ()) + 6


def _fewest(lengths: list[int], rooms: tuple[int, ...]) -> int:
    """Try all ways to pack rows of 100."""
    if not lengths:
        return len(rooms)
    length, *others = lengths
    fitting = {room for room in rooms if length <= room}
    tries = [_fewest(others, _with(rooms, room, room - length)) for room in fitting]
    return min([*tries, _fewest(others, (*rooms, 100 - length))])


def _with(rooms: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    at = rooms.index(old)
    return (*rooms[:at], new, *rooms[at + 1 :])


@given(lengths=LENGTHS, cost=COSTS, world=WORLDS, seed=st.integers())
def test_every_rank_finds_the_same_rows(
    lengths: dict[int, int], cost: SequenceCost, world: int, seed: int
) -> None:
    shuffled = list(lengths.items())
    random.Random(seed).shuffle(shuffled)
    assert even_rows(dict(shuffled), cost, world, 300) == even_rows(lengths, cost, world, 300)


def test_long_sequences_count_for_their_attention() -> None:
    """By tokens, the long one and one of the others would be as much as four of them."""
    lengths = {0: 30, 1: 10, 2: 10, 3: 10, 4: 10, 5: 10}
    assert even_rows(lengths, SequenceCost(1, 0), 2, 100) == [[(0, 4)], [(1, 2, 3, 5)]]
    assert even_rows(lengths, SequenceCost(1, 1), 2, 100) == [[(0,)], [(1, 2, 3, 4, 5)]]
