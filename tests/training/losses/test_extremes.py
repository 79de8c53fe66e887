"""Ratios beyond float32: finite where the definition is, not finite where it is not, never NaN by 0 * inf."""

from math import exp, inf, isnan, nan

import pytest
import torch

from tests.training.losses.support import naive
from tests.training.losses.support.cases import NAMES, filled, make, run

FAR = 200.0  # exp(200) overflows float32

# By loss, for advantages 1, -1 and 0 at r = exp(200): (value, gradient) of the token.
BEYOND: dict[str, tuple[tuple[float, float], ...]] = {
    "importance_sampling": ((-inf, -inf), (inf, inf), (0, 0)),
    "ppo": ((-1.2, 0), (inf, inf), (0, 0)),
    "cispo": ((4, -4), (-4, 4), (0, 0)),
    "dro": ((1001, 9), (999, 11), (1000, 10)),
    "gspo": ((-1.0004, 0), (inf, inf), (0, 0)),
    "stable_reinforce": ((0, 0), (0, 0), (0, 0)),
    "regular": ((-1.2, 0), (inf, inf), (0, 0)),
    "dual_clip": ((-1.2, 0), (3, 0), (0, 0)),
    "sapo": ((-4, 0), (4 / 1.05, 0), (0, 0)),
    "clip_cov": ((-1.2, 0), (inf, inf), (0, 0)),
    "kl_cov": ((-inf, -inf), (inf, inf), (0, 0)),
}
# The same at r = exp(-200), which float32 rounds to 0.
BELOW: dict[str, tuple[tuple[float, float], ...]] = {
    "importance_sampling": ((0, 0), (0, 0), (0, 0)),
    "ppo": ((0, 0), (0.8, 0), (0, 0)),
    "cispo": ((0, 0), (0, 0), (0, 0)),
    "dro": ((1001, -11), (999, -9), (1000, -10)),
    "gspo": ((0, 0), (0.9997, 0), (0, 0)),
    "stable_reinforce": ((0, 0), (0, 0), (0, 0)),
    "regular": ((0, 0), (0.8, 0), (0, 0)),
    "dual_clip": ((0, 0), (0.8, 0), (0, 0)),
    "sapo": ((-4 / (1 + exp(1)), 0), (4 / 1.05 / (1 + exp(1.05)), 0), (0, 0)),
    "clip_cov": ((0, 0), (0.8, 0), (0, 0)),
    "kl_cov": ((200, -1), (200, -1), (0, 0)),
}


def one_token(name: str, advantage: float, log_ratio: float) -> naive.Request:
    """Tokens at logprob -1."""
    q = [-1.0 - log_ratio]
    inputs = {
        "logprobs": q,
        "sampling_logprobs": q,
        "advantages": [advantage],
        "sampled": [1.0],
        "sequence_ratio_mask": [1.0],
    }
    return naive.Request(inputs, ((1,),), filled(name, {}))


def check(name: str, advantage: float, log_ratio: float, expected: tuple[float, float]) -> None:
    values, gradient, _ = run(name, torch.tensor([-1.0]), one_token(name, advantage, log_ratio))
    assert (values.item(), gradient.item()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sign", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(BEYOND))
def test_far_above(name: str, sign: int) -> None:
    check(name, (1.0, -1.0, 0.0)[sign], FAR, BEYOND[name][sign])


@pytest.mark.parametrize("sign", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(BELOW))
def test_far_below(name: str, sign: int) -> None:
    check(name, (1.0, -1.0, 0.0)[sign], -FAR, BELOW[name][sign])


def test_every_loss_with_a_ratio_has_its_row() -> None:
    assert BEYOND.keys() == BELOW.keys() == set(NAMES) - {"cross_entropy"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_a_logprob_that_is_not_a_number_shows_in_the_loss(name: str, seed: int) -> None:
    logprobs, request = make(name, seed=seed)
    sampled = request.inputs.get("sampled", [1.0] * len(logprobs))
    logprobs[sampled.index(1.0, seed)] = nan
    values, _, _ = run(name, logprobs, request)
    assert isnan(values.sum().item())
