from math import prod

import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, clipped_surrogate


def gspo(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """GSPO-token (arXiv:2507.18071): in every token s has the gradient of that token's own logp, s * logp'.

    -sum(min(s * A, clip(s, low, high) * A)), with s of a datum = exp(mean of logp - q) over the tokens whose
    sequence_ratio_mask is not zero, and 1 if there are none.
    """
    inputs, config = context.inputs, context.config
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    # The difference is zero exactly and is taken first, so that s keeps all its digits.
    log_ratio = (logprobs - logprobs.detach()) + _sequence_log_ratio(logprobs.detach(), context)
    return clipped_surrogate(logprobs, log_ratio, inputs, low, high)


def _sequence_log_ratio(logprobs: torch.Tensor, context: LossContext) -> torch.Tensor:
    """Compute each token's mean log ratio of its datum, [n]. In float64, as thresholds lie 3e-4 from 1."""
    lengths = torch.tensor([prod(shape) for shape in context.shapes], device=logprobs.device)
    mask = context.inputs["sequence_ratio_mask"] != 0
    log_ratio = torch.where(mask, logprobs - context.inputs["logprobs"], 0.0).double()
    total = torch.segment_reduce(log_ratio, "sum", lengths=lengths)
    count = torch.segment_reduce(mask.double(), "sum", lengths=lengths)
    return (total / count.clamp(min=1)).repeat_interleave(lengths).to(logprobs.dtype)
