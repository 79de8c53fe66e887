"""Layers run again as few as will do."""

import pytest

from skyrl_tinker.domain.memory_costs import RowPeak


def test_each_layer_takes_away_the_same_down_to_the_peak_within_one() -> None:
    row = RowPeak(kept=100, recomputed=35, layer=20, layers=4)
    assert [row.needed(again) for again in range(5)] == [100, 80, 60, 40, 35]
    assert RowPeak(30, 35, 20, 4).needed(0) == 30


@pytest.mark.parametrize(
    ("room", "again"), [(100, 0), (99, 1), (80, 1), (79.5, 2), (40, 3), (39, 4), (35, 4), (0, 4)]
)
def test_the_fewest_layers_run_again_that_let_the_row_fit(room: float, again: int) -> None:
    row = RowPeak(100, 35, 20, 4)
    assert row.again_within(room) == again
    assert row.again_within(room, choice=True) == 4
    assert row.again_within(room, choice=False) == 0
