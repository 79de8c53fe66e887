import torch

from skyrl_tinker.training.losses.base import Config, Inputs, LossTerms


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> LossTerms:
    """-sum(w * logp): negative log-likelihood. Weights are any finite numbers, negative ones included."""
    weights = inputs["weights"]
    return LossTerms(-weights * logprobs, {"weights:sum": weights.sum()})
