import torch

from skyrl_tinker.training.losses.base import (
    FAR,
    LossContext,
    LossTerms,
    clip_metrics,
    clipped_objective,
    epsilon_bounds,
)


def dual_clip(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Dual-clip PPO (arXiv:1912.09729): `regular`, and where A < 0 the objective is at least c * A.

    -sum(max(min(r * A, clip(r) * A), c * A)), c = clip_ratio_c. A token that the policy has come to favour
    far more than the sampler did cannot make the loss grow without bound.
    """
    inputs = context.inputs
    advantages = inputs["advantages"]
    low, high = epsilon_bounds(context.config)
    ratio = (logprobs - inputs["logprobs"]).clamp(max=FAR).exp()
    objective = clipped_objective(ratio, advantages, low, high)
    floor = torch.where(advantages < 0, context.config["clip_ratio_c"] * advantages, -torch.inf)
    metrics = clip_metrics(logprobs, inputs, ratio, low, high)
    metrics["dual_clipped_tokens:sum"] = (objective < floor).sum()
    return LossTerms(-torch.maximum(objective, floor), metrics)
