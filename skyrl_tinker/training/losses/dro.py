import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, policy_metrics


def dro(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Direct reward optimisation (arXiv:2405.19107): a quadratic penalty in place of an importance ratio.

    -sum(logp * A - beta / 2 * (logp - q)^2). The penalty counts at every position, also where A is zero.
    """
    q, advantages = context.inputs["logprobs"], context.inputs["advantages"]
    penalty = context.config["beta"] / 2 * (logprobs - q).square()
    return LossTerms(penalty - logprobs * advantages, policy_metrics(logprobs, q, advantages != 0))
