"""Ranks of one host have neighbouring numbers, the first of them those of the engine's host."""

import pytest

from skyrl_tinker.training.rank_placement import by_host, first_elsewhere


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ("aaaa", [0, 1, 2, 3]),
        ("abab", [0, 2, 1, 3]),
        ("bcacacb", [0, 6, 1, 3, 5, 2, 4]),
        ("zababab", [0, 1, 3, 5, 2, 4, 6]),
        ("cabbab", [0, 2, 3, 5, 1, 4]),
    ],
)
def test_ranks_are_numbered_host_by_host(nodes: str, order: list[int]) -> None:
    assert by_host(dict(enumerate(nodes))) == order


@pytest.mark.parametrize(("nodes", "first"), [("aaaa", []), ("aabbb", [2]), ("abbcc", [1, 3])])
def test_one_rank_of_each_other_host_copies_its_files(nodes: str, first: list[int]) -> None:
    assert first_elsewhere(nodes) == first
