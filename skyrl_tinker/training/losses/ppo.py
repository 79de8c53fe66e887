import torch

from skyrl_tinker.training.losses.base import Config, Inputs, LossTerms, clipped_tokens, policy_metrics


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> LossTerms:
    """-sum(min(r * A, clip(r, low, high) * A)), r = exp(logp - q): the clipped surrogate objective of PPO
    (arXiv:1707.06347, eq. 7). Thresholds are bounds of r itself, not distances from 1.
    """
    advantages = inputs["advantages"]
    ratio = (logprobs - inputs["logprobs"]).exp()
    kept = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    metrics = policy_metrics(logprobs, inputs) | {"clipped_tokens:sum": clipped_tokens(ratio, kept, inputs)}
    return LossTerms(-torch.minimum(ratio * advantages, kept * advantages), metrics)
