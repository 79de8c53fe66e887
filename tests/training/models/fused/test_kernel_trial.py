"""A kernel that is tried out is used where its results are as expected, in every tensor."""

import pytest
import torch

from skyrl_tinker.training.models.fused.kernel_trial import fault_of

GOOD = torch.ones(4)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ([GOOD, GOOD * 1.00001], None),
        ([GOOD, GOOD * 1.001], "relative error 0.001, expected at most 0.0001"),
        ([GOOD, GOOD * torch.nan], "relative error nan, expected at most 0.0001"),
        ([GOOD * torch.inf, GOOD], "relative error inf, expected at most 0.0001"),
        ([GOOD], "ValueError: zip() argument 2 is longer than argument 1"),
    ],
)
def test_what_differs_anywhere_is_told(found: list[torch.Tensor], fault: str | None) -> None:
    assert fault_of(lambda: found, [GOOD, GOOD]) == fault


def test_16_bits_round_more() -> None:
    expected = GOOD.to(torch.bfloat16)
    assert fault_of(lambda: [expected * 1.01], [expected]) is None
    assert fault_of(lambda: [expected * 1.03], [expected]) is not None
