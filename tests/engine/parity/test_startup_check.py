from math import inf, nan

import pytest

from skyrl_tinker import config
from skyrl_tinker.engine.parity.probe import allowed_gap
from skyrl_tinker.engine.parity.startup_check import LogprobGap, require_agreement
from skyrl_tinker.errors import StartupError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_start_with_logprobs_that_disagree_is_refused_in_any_dtype(dtype: str) -> None:
    allowed = allowed_gap(config.load(trainer_dtype=dtype))
    require_agreement(LogprobGap(allowed, allowed), allowed)
    for wrong in (1.1 * allowed, nan, inf):
        for gap in (LogprobGap(wrong, 0.0), LogprobGap(0.0, wrong)):
            with pytest.raises(StartupError, match=r"disagree on logprobs: base .* allowed"):
                require_agreement(gap, allowed)


def test_without_adapters_the_base_alone_decides() -> None:
    require_agreement(LogprobGap(1e-5), 1e-3)
    for wrong in (1.0, nan):
        with pytest.raises(StartupError, match=r"disagree on logprobs: base [^,]*, allowed"):
            require_agreement(LogprobGap(wrong), 1e-3)


def test_the_setting_bounds_the_start_as_well() -> None:
    assert allowed_gap(config.load(trainer_dtype="bfloat16")) == 0.25
    assert allowed_gap(config.load(trainer_dtype="bfloat16", parity={"gap_bound": 0.5})) == 0.5
