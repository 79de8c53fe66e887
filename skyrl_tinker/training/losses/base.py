"""Interface of a loss function, and the terms that several losses share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from skyrl_tinker.domain.values import CustomLoss

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


class LossTerms(NamedTuple):
    """Result: `values` float32, [n] one per target or [D] one per datum, whose sum is the loss; and metrics.

    Metrics are scalars; keys end in :sum, :min, :max or :mean. The value under a :mean key is the sum over
    datums; it is divided by the request's number of datums once all of them are in.
    """

    values: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossContext:
    """D datums of one request over which a loss is taken, end to end: n targets.

    D is all datums of the request for losses with `whole_request` in domain.loss_specs, else some.
    """

    inputs: Inputs  # each [n] float32, optional and recorded ones filled in
    shapes: tuple[tuple[int, ...], ...]  # per datum: (N,) or (N, K); the products sum to n
    config: Config  # defaults filled in
    seed: int  # of the request: the same when it is run again
    custom: CustomLoss | None = None
    seconds: float = math.inf  # time limit of `custom`
    custom_inputs: tuple[Inputs, ...] = ()  # of `custom`, per datum, in the client's dtypes and shapes


LossFunction = Callable[[torch.Tensor, LossContext], LossTerms]
"""(target logprobs [n], context) -> terms."""

FAR = 20.0
"""Largest log ratio. Beyond exp(20) every objective that has a threshold, or saturates, is flat in r for all
config values of domain.loss_specs. Log ratios are clamped there, which alters nothing: else exp overflows,
and the gradient, zero by definition, becomes 0 * inf = NaN.
"""


def importance_ratio(log_ratio: torch.Tensor, bounded: torch.Tensor) -> torch.Tensor:
    """Compute r = exp(logp - q), [n]. `bounded` (bool [n]): where the objective is flat in r from FAR on.

    Elsewhere r is not clamped: where it is infinite, so is the loss.
    """
    return torch.where(bounded, log_ratio.clamp(max=FAR), log_ratio).exp()


def epsilon_bounds(config: Config) -> tuple[float, float]:
    """Return the range of r given by distances from 1: the two epsilons of DAPO (arXiv:2503.14476)."""
    return 1 - config["eps_low"], 1 + config["eps_high"]


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Compute PPO's min(r * A, clip(r, low, high) * A), [n] (arXiv:1707.06347, eq. 7)."""
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def clipped_surrogate(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, inputs: Inputs, low: float, high: float
) -> LossTerms:
    """Compute PPO's loss, the negated `clipped_objective` of exp(log_ratio), and its `clip_metrics`."""
    ratio = importance_ratio(log_ratio, bounded=inputs["advantages"] >= 0)
    values = -clipped_objective(ratio, inputs["advantages"], low, high)
    return LossTerms(values, clip_metrics(logprobs, inputs, ratio, low, high))


def policy_metrics(logprobs: torch.Tensor, q: torch.Tensor, active: torch.Tensor) -> dict[str, torch.Tensor]:
    """Count the `active` tokens (bool [n]) and estimate the policy's KL from the sampler on them (k1)."""
    return {
        "active_tokens:sum": active.sum(),
        "kl_sampler_policy:sum": torch.where(active, q - logprobs.detach(), 0.0).sum(dtype=torch.float64),
    }


def clip_metrics(
    logprobs: torch.Tensor, inputs: Inputs, ratio: torch.Tensor, low: float, high: float
) -> dict[str, torch.Tensor]:
    """Return policy_metrics of tokens with an advantage, and how many of them have r outside [low, high]."""
    active = inputs["advantages"] != 0
    outside = (ratio < low) | (ratio > high)
    metrics = policy_metrics(logprobs, inputs["logprobs"], active)
    return metrics | {"clipped_tokens:sum": (outside & active).sum()}
