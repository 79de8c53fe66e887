import torch

from skyrl_tinker.training.losses.base import Config, Inputs, LossTerms, clipped_tokens, policy_metrics


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> LossTerms:
    """-sum(stop_gradient(clip(r, low, high)) * logp * A), r = exp(logp - q): clipped importance weights, of
    MiniMax-M1 (arXiv:2506.13585, eq. 4). Every token keeps its gradient; only its weight is bounded.
    """
    ratio = (logprobs.detach() - inputs["logprobs"]).exp()
    kept = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    metrics = policy_metrics(logprobs, inputs) | {"clipped_tokens:sum": clipped_tokens(ratio, kept, inputs)}
    return LossTerms(-kept * logprobs * inputs["advantages"], metrics)
