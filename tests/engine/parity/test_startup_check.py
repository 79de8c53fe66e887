from math import inf, nan
from typing import cast

import pytest

from skyrl_tinker import config
from skyrl_tinker.domain.samples import SampledSequence
from skyrl_tinker.engine.parity.probe import allowed_gap
from skyrl_tinker.engine.parity.startup_check import LogprobGap, compare_own, require_agreement
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.errors import StartupError
from tests.support.scripted_samplers import ScriptedSamplers


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


def drawn_by(samplers: ScriptedSamplers, drawn: float, scored: float) -> Samplers:
    """Have the samplers draw tokens with one logprob, and score with another."""
    samplers.sequences = (SampledSequence((5, 6, 7), (drawn,) * 3, "length"),)
    samplers.prompt_logprob = scored
    return cast(Samplers, samplers)


async def test_samplers_without_a_trainer_are_compared_with_themselves() -> None:
    samplers = ScriptedSamplers()
    gap = await compare_own(drawn_by(samplers, -1.5, -1.25))
    assert gap == LogprobGap(0.25)
    prompt, again = samplers.drawn
    assert again == (*prompt, 5, 6, 7)
    with pytest.raises(StartupError, match=r"^logprobs of the sampler of b differ between .* base 2\.5e-01"):
        require_agreement(gap, 1e-3, "sampler of b")
    require_agreement(await compare_own(drawn_by(samplers, -1.5, -1.5)), 1e-3, "sampler of b")
