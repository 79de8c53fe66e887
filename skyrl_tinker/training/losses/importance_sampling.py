import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, importance_ratio, policy_metrics


def importance_sampling(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Policy gradient corrected for the sampler q: -sum(exp(logp - q) * A).

    The surrogate of TRPO (arXiv:1502.05477, eq. 14) without its trust region.
    """
    q, advantages = context.inputs["logprobs"], context.inputs["advantages"]
    ratio = importance_ratio(logprobs - q, bounded=advantages == 0)
    return LossTerms(-ratio * advantages, policy_metrics(logprobs, q, advantages != 0))
