"""Metrics count tokens that have a say, as a plain loop over them does."""

from math import exp

import pytest
import torch

from tests.training.losses.support import naive
from tests.training.losses.support.cases import NAMES, make, run

CLIPPED = ("ppo", "cispo", "regular", "dual_clip", "clip_cov")
"""Losses that clip the ratio of each token."""


def log_ratios(logprobs: list[float], request: naive.Request) -> dict[int, float]:
    """logp - q of the sampled tokens with an advantage, by position."""
    inputs = request.inputs
    q = inputs["sampling_logprobs"] if "sampling_logprobs" in inputs else inputs["logprobs"]
    sampled = inputs.get("sampled", [1.0] * len(q))
    counted = [i for i, advantage in enumerate(inputs["advantages"]) if advantage and sampled[i]]
    return {i: logprobs[i] - q[i] for i in counted}


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cross_entropy"}))
def test_active_tokens_are_sampled_and_have_an_advantage_and_their_kl_is_from_the_sampler(name: str) -> None:
    logprobs, request = make(name)
    metrics = run(name, logprobs, request)[2]
    found = log_ratios(logprobs.tolist(), request)
    assert metrics["active_tokens:sum"] == len(found) < len(logprobs)
    assert metrics["kl_sampler_policy:sum"] == pytest.approx(-sum(found.values()))


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_tokens_are_active_ones_outside_of_the_range(name: str) -> None:
    logprobs, request = make(name, seed=1)
    config = request.config
    low, high = (
        (1 - config["eps_low"], 1 + config["eps_high"])
        if "eps_low" in config
        else (config["clip_low_threshold"], config["clip_high_threshold"])
    )
    outside = [
        i for i, each in log_ratios(logprobs.tolist(), request).items() if not low <= exp(each) <= high
    ]
    assert run(name, logprobs, request)[2]["clipped_tokens:sum"] == len(outside) > 0


def test_dual_clipped_tokens_are_those_whose_loss_the_second_bound_holds_down() -> None:
    logprobs, request = make("dual_clip", {"clip_ratio_c": 1.5}, seed=1)
    advantages, bound = request.inputs["advantages"], request.config["clip_ratio_c"]
    held = [
        i
        for i, each in log_ratios(logprobs.tolist(), request).items()
        if advantages[i] < 0 and exp(each) > bound
    ]
    assert run("dual_clip", logprobs, request)[2]["dual_clipped_tokens:sum"] == len(held) > 0


def test_weights_are_added_up() -> None:
    logprobs, request = make("cross_entropy")
    assert run("cross_entropy", logprobs, request)[2]["weights:sum"] == sum(request.inputs["weights"])


def test_sums_beyond_float32_are_numbers() -> None:
    logprobs = torch.full((4,), -1e-3)
    ones, huge = [1.0] * 4, [3e38] * 4
    weighted = naive.Request({"weights": huge}, ((4,),), {})
    assert run("cross_entropy", logprobs, weighted)[2]["weights:sum"] == pytest.approx(1.2e39)
    improbable = naive.Request({"logprobs": huge, "advantages": ones}, ((4,),), {})
    found = run("importance_sampling", logprobs, improbable)[2]["kl_sampler_policy:sum"]
    assert found == pytest.approx(1.2e39)
