"""What a loss function is."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from skyrl_tinker.domain.values import CustomLoss

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


class LossTerms(NamedTuple):
    """`values` float32, [n] one per target or [D] one per datum: their sum is the loss.

    Metrics are scalars; keys end in :sum, :min, :max or :mean. What is given under a :mean key is the sum
    over datums; it is divided by the request's number of datums once all of them are in.
    """

    values: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossContext:
    """The D datums of one request that a loss is taken over, end to end: n targets.

    D is all datums of the request for losses that say so (`whole_request` in domain.loss_specs), else some.
    """

    inputs: Inputs  # each [n] float32, optional and recorded ones filled in
    shapes: tuple[tuple[int, ...], ...]  # per datum: (N,) or (N, K); the products sum to n
    config: Config  # defaults filled in
    seed: int  # of the request: the same when it is run again
    custom: CustomLoss | None = None
    seconds: float = math.inf
    """For `custom`: how long it may take."""
    own_inputs: tuple[Inputs, ...] = ()
    """For `custom`: per datum what it reads beside logprobs, in the client's dtypes and shapes."""


LossFunction = Callable[[torch.Tensor, LossContext], LossTerms]
"""(target logprobs [n], context) -> terms."""


FAR = 20.0
"""A log ratio. Beyond exp(20) every objective that has a threshold, or saturates, is flat in r for all config
values of domain.loss_specs. Log ratios are clamped there, which alters nothing: else exp overflows, and the
gradient, zero by definition, becomes 0 * inf = NaN.
"""


def importance_ratio(log_ratio: torch.Tensor, bounded: torch.Tensor) -> torch.Tensor:
    """r = exp(logp - q), [n]. `bounded` (bool [n]): where the objective is flat in r from FAR on.

    Elsewhere r is what it is: where it is infinite, so is the loss.
    """
    return torch.where(bounded, log_ratio.clamp(max=FAR), log_ratio).exp()


def epsilon_bounds(config: Config) -> tuple[float, float]:
    """The range of r given by distances from 1: the two epsilons of DAPO (arXiv:2503.14476)."""
    return 1 - config["eps_low"], 1 + config["eps_high"]


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(r * A, clip(r, low, high) * A), [n]: PPO's (arXiv:1707.06347, eq. 7)."""
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def policy_metrics(logprobs: torch.Tensor, q: torch.Tensor, active: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the `active` tokens (bool [n]): how many, and how far the policy is from the sampler (k1)."""
    return {
        "active_tokens:sum": active.sum(),
        "kl_sampler_policy:sum": torch.where(active, q - logprobs.detach(), 0.0).sum(),
    }


def clip_metrics(
    logprobs: torch.Tensor, inputs: Inputs, ratio: torch.Tensor, low: float, high: float
) -> dict[str, torch.Tensor]:
    """policy_metrics of the tokens with an advantage, and how many of them have r outside [low, high]."""
    active = inputs["advantages"] != 0
    outside = (ratio < low) | (ratio > high)
    metrics = policy_metrics(logprobs, inputs["logprobs"], active)
    return metrics | {"clipped_tokens:sum": (outside & active).sum()}
