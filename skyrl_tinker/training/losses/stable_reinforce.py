import torch

from skyrl_tinker.training.losses.base import LossContext, LossTerms, policy_metrics


def stable_reinforce(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """REINFORCE that stays stable on old or inexact samples.

    The contract is Tinker's, the objective is ours:

        sum over sampled tokens of m * (-stop_gradient(min(r, c)) * A * logp + kl_coeff / 2 * (logp - q)^2)

    q: the logprob that was recorded when the token was sampled; r = exp(logp - q); c = ratio_cap.
    min(r, c) is truncated importance sampling (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl).
    m = 1 where mask_low <= r <= mask_high, else 0, as IcePop masks (Ring-1T, arXiv:2510.18855;
    https://ringtech.notion.site/icepop). A masked token gives no gradient at all, not even of the
    penalty, since it grows with the very discrepancy that got the token masked.
    The penalty is Schulman's k2 estimate of the divergence (http://joschu.net/blog/kl-approx.html).
    On-policy (r = 1) this has the gradient of plain REINFORCE, -sum(A * logp'): the penalty is flat there.
    Tokens that were not sampled (`sampled` = 0: prompts) give nothing.
    """
    q, advantages = context.inputs["sampling_logprobs"], context.inputs["advantages"]
    sampled = context.inputs["sampled"] != 0
    ratio = (logprobs.detach() - q).exp()
    # Tests for the outside of the range, so that a NaN is not masked.
    outside = (ratio < context.config["mask_low"]) | (ratio > context.config["mask_high"])
    kept = sampled & ~outside
    weight = ratio.clamp(max=context.config["ratio_cap"])
    distance = torch.where(kept, logprobs - q, 0.0)
    values = torch.where(kept, -weight * advantages * logprobs, 0.0)
    values = values + context.config["kl_coeff"] / 2 * distance.square()
    active = sampled & (advantages != 0)
    capped = kept & active & (ratio > context.config["ratio_cap"])
    metrics = policy_metrics(logprobs, q, active) | {
        "masked_tokens:sum": (sampled & outside).sum(),
        "clipped_tokens:sum": capped.sum(),
    }
    return LossTerms(values, metrics)
