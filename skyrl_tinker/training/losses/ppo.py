import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, clipped_surrogate


def ppo(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Clipped surrogate objective of PPO (arXiv:1707.06347, eq. 7).

    -sum(min(r * A, clip(r, low, high) * A)), r = exp(logp - q). Thresholds are bounds of r itself, not
    distances from 1.
    """
    inputs, config = context.inputs, context.config
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return clipped_surrogate(logprobs, logprobs - inputs["logprobs"], inputs, low, high)
