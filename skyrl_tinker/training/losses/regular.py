import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, clipped_surrogate, epsilon_bounds


def regular(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with the two epsilons of DAPO (arXiv:2503.14476).

    -sum(min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)), r = exp(logp - q).
    """
    inputs = context.inputs
    log_ratio = logprobs - inputs["logprobs"]
    return clipped_surrogate(logprobs, log_ratio, inputs, *epsilon_bounds(context.config))
