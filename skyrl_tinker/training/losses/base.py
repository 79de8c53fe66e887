"""What a loss function is."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


class LossTerms(NamedTuple):
    """`per_token` [n] float32: its sum is the loss. Metrics are scalars, keys end in :sum, :min or :max."""

    per_token: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


LossFunction = Callable[[torch.Tensor, Inputs, Config], LossTerms]
"""(target logprobs [n], named inputs each [n], config with defaults filled in) -> terms."""


def policy_metrics(logprobs: torch.Tensor, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Of the tokens with an advantage: how many, and how far the policy is from the sampler (k1 estimate)."""
    active = inputs["advantages"] != 0
    return {
        "active_tokens:sum": active.sum(),
        "kl_sampler_policy:sum": ((inputs["logprobs"] - logprobs.detach()) * active).sum(),
    }


def clipped_tokens(ratio: torch.Tensor, kept: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return ((ratio != kept) & (inputs["advantages"] != 0)).sum()
