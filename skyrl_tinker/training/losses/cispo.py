import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, clip_metrics


def cispo(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Clipped importance weights, of MiniMax-M1 (arXiv:2506.13585, eq. 4).

    -sum(stop_gradient(clip(r, low, high)) * logp * A), r = exp(logp - q). Every token keeps its gradient;
    only its weight is bounded.
    """
    inputs, config = context.inputs, context.config
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    ratio = (logprobs.detach() - inputs["logprobs"]).exp()
    values = -ratio.clamp(low, high) * logprobs * inputs["advantages"]
    return LossTerms(values, clip_metrics(logprobs, inputs, ratio, low, high))
