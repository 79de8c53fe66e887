import torch

from skyrl_tinker.training.losses.base import (
    LossContext,
    LossTerms,
    clip_metrics,
    clipped_objective,
    epsilon_bounds,
    importance_ratio,
)


def regular(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with the two epsilons of DAPO (arXiv:2503.14476).

    -sum(min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)), r = exp(logp - q).
    """
    inputs = context.inputs
    low, high = epsilon_bounds(context.config)
    ratio = importance_ratio(logprobs - inputs["logprobs"], bounded=inputs["advantages"] >= 0)
    values = -clipped_objective(ratio, inputs["advantages"], low, high)
    return LossTerms(values, clip_metrics(logprobs, inputs, ratio, low, high))
