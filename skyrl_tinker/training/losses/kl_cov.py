import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, importance_ratio, policy_metrics
from skyrl_tinker.training.losses.covariance import covariances, share


def kl_cov(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """KL-Cov (arXiv:2505.22617).

    -sum(r * A) + ppo_kl_coef * sum(|logp - q|) over the chosen tokens, r = exp(logp - q). Chosen are, of all
    tokens of a request with A != 0, the share kl_cov_ratio whose covariance of A and logp is largest, the
    earlier one of two equals. |.| has the gradient 0 at 0, so on-policy nothing is penalised.
    """
    q, advantages = context.inputs["logprobs"], context.inputs["advantages"]
    ratio = importance_ratio(logprobs - q, bounded=advantages == 0)
    chosen = _chosen(logprobs, advantages, context.config["kl_cov_ratio"])
    penalty = torch.where(chosen, context.config["ppo_kl_coef"] * (logprobs - q).abs(), 0.0)
    metrics = policy_metrics(logprobs, q, advantages != 0) | {"penalized_tokens:sum": chosen.sum()}
    return LossTerms(penalty - ratio * advantages, metrics)


def _chosen(logprobs: torch.Tensor, advantages: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the chosen tokens, bool [n]."""
    order = covariances(logprobs, advantages).sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(advantages, dtype=torch.bool)
    chosen[order[: share(fraction, int((advantages != 0).sum()))]] = True
    return chosen
