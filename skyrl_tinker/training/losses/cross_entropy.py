import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms


def cross_entropy(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Negative log-likelihood -sum(w * logp), over all K candidates of a position where targets are [N, K].

    Weights are any finite numbers, negative ones included.
    """
    weights = context.inputs["weights"]
    return LossTerms(-weights * logprobs, {"weights:sum": weights.sum(dtype=torch.float64)})
