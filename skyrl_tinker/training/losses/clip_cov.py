import torch

from skyrl_tinker.training.losses.base import (
    LossContext,
    LossTerms,
    clip_metrics,
    clipped_objective,
    epsilon_bounds,
    importance_ratio,
)
from skyrl_tinker.training.losses.covariance import covariances, share


def clip_cov(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Clip-Cov (arXiv:2505.22617): `regular` over a whole request, without some tokens of high covariance.

    These give neither loss nor gradient. Of the tokens that `regular` does not clip and whose covariance of A
    and logp lies between clip_cov_lb and clip_cov_ub, a share is drawn at random: clip_cov_ratio of all
    tokens with A != 0. The draw is seeded by the request.
    """
    inputs = context.inputs
    advantages = inputs["advantages"]
    low, high = epsilon_bounds(context.config)
    dropped = _draw(logprobs, context, low, high)
    ratio = importance_ratio(logprobs - inputs["logprobs"], bounded=(advantages >= 0) | dropped)
    values = torch.where(dropped, 0.0, -clipped_objective(ratio, advantages, low, high))
    metrics = clip_metrics(logprobs, inputs, ratio, low, high)
    metrics["masked_tokens:sum"] = dropped.sum()
    return LossTerms(values, metrics)


def _draw(logprobs: torch.Tensor, context: LossContext, low: float, high: float) -> torch.Tensor:
    """Draw the tokens to leave out, bool [n]."""
    advantages = context.inputs["advantages"]
    ratio = (logprobs.detach() - context.inputs["logprobs"]).exp()
    clipped = ratio.clamp(low, high) * advantages < ratio * advantages
    covariance = covariances(logprobs, advantages)
    inside = (covariance > context.config["clip_cov_lb"]) & (covariance < context.config["clip_cov_ub"])
    candidates = (inside & ~clipped).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(context.seed)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    count = share(context.config["clip_cov_ratio"], int((advantages != 0).sum()))
    dropped = torch.zeros_like(advantages, dtype=torch.bool)
    dropped[candidates[order[:count]]] = True
    return dropped
