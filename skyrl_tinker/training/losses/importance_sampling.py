import torch

from skyrl_tinker.training.losses.base import Config, Inputs, LossTerms, policy_metrics


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> LossTerms:
    """-sum(exp(logp - q) * A): policy gradient corrected for the sampler q, the surrogate of TRPO
    (arXiv:1502.05477, eq. 14) without its trust region.
    """
    ratio = (logprobs - inputs["logprobs"]).exp()
    return LossTerms(-ratio * inputs["advantages"], policy_metrics(logprobs, inputs))
