import torch

from skyrl_tinker.training.losses.base import FAR, LossContext, LossTerms, policy_metrics


def sapo(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """Soft adaptive policy optimization (arXiv:2511.20347).

    -sum(4 / tau * sigmoid(tau * (r - 1)) * A), r = exp(logp - q), tau = tau_pos where A > 0, else tau_neg.
    The gate's slope is 1 at r = 1 and fades on both sides: no hard clipping.
    """
    q, advantages = context.inputs["logprobs"], context.inputs["advantages"]
    ratio = (logprobs - q).clamp(max=FAR).exp()
    tau = torch.full_like(advantages, context.config["tau_neg"])
    tau = tau.masked_fill(advantages > 0, context.config["tau_pos"])
    # torch.sigmoid rounds by a token's position in the array. Beyond 80 the gate is 0 to 34 digits.
    gate = 4 / tau / (1 + (tau * (1 - ratio)).clamp(max=80.0).exp())
    return LossTerms(-gate * advantages, policy_metrics(logprobs, q, advantages != 0))
