"""Ratios of tokens sampled at T = 0.5 under both values of `sampled_logprobs`, as docs/losses.md has them.

Expectations are exact: sums over a small vocabulary, on-policy (trainer and sampler have the same weights).
"""

import pytest
import torch

from skyrl_tinker.training.losses import LOSS_FUNCTIONS, LossContext
from tests.training.losses.support.cases import filled

TEMPERATURE = 0.5
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, 0.5, -0.5], dtype=torch.float64)
POLICY = torch.log_softmax(LOGITS, -1)
SAMPLED_FROM = torch.log_softmax(LOGITS / TEMPERATURE, -1)
Q = {"raw": POLICY, "processed": SAMPLED_FROM}
RATIO = (POLICY - SAMPLED_FROM).exp()
LOSSES = ["importance_sampling", "ppo", "cispo"]


def expected_step(name: str, mode: str) -> tuple[torch.Tensor, float]:
    """Minus the loss's gradient over the logits, expected over what is sampled; and how many are clipped."""
    logits = LOGITS.clone().requires_grad_()
    inputs = {"logprobs": Q[mode], "advantages": ADVANTAGES}
    context = LossContext(inputs, ((len(LOGITS),),), filled(name, {}), 0)
    terms = LOSS_FUNCTIONS[name](torch.log_softmax(logits, -1), context)
    (gradient,) = torch.autograd.grad((SAMPLED_FROM.exp() * terms.values).sum(), logits)
    return -gradient, float(terms.metrics.get("clipped_tokens:sum", 0))


def policy_gradient(probabilities: torch.Tensor, weights: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Sum of p(x) * weight(x) * A(x) * gradient of log softmax(logits)[x]."""
    scale = probabilities * weights * ADVANTAGES
    return scale - scale.sum() * POLICY.exp()


@pytest.mark.parametrize("name", LOSSES)
def test_raw_logprobs_give_ratio_1_and_reinforce_over_what_was_sampled(name: str) -> None:
    step, clipped = expected_step(name, "raw")
    torch.testing.assert_close(step, policy_gradient(SAMPLED_FROM.exp()))
    assert clipped == 0
    assert not torch.allclose(step, policy_gradient(POLICY.exp()))


def test_processed_logprobs_give_importance_sampling_the_gradient_at_temperature_1() -> None:
    step, _ = expected_step("importance_sampling", "processed")
    torch.testing.assert_close(step, policy_gradient(POLICY.exp()))


def test_processed_logprobs_have_ppo_clip_on_policy_tokens() -> None:
    step, clipped = expected_step("ppo", "processed")
    kept = torch.where(ADVANTAGES > 0, RATIO <= 1.2, RATIO >= 0.8)
    torch.testing.assert_close(step, policy_gradient(SAMPLED_FROM.exp(), RATIO * kept))
    assert clipped == ((RATIO < 0.8) | (RATIO > 1.2)).sum() > 0
    assert not kept.all()


def test_processed_logprobs_are_weights_up_to_the_threshold_for_cispo() -> None:
    step, clipped = expected_step("cispo", "processed")
    torch.testing.assert_close(step, policy_gradient(SAMPLED_FROM.exp(), RATIO.clamp(max=4)))
    assert clipped == (RATIO > 4).sum() > 0
