"""What a loss function is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from skyrl_tinker.wire.values import CustomLoss

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


class LossTerms(NamedTuple):
    """`values` float32, [n] one per target or [D] one per datum: their sum is the loss.

    Metrics are scalars; keys end in :sum, :min, :max or :mean. What is given under a :mean key is the sum over
    datums; it is divided by the request's number of datums once all of them are in.
    """

    values: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossContext:
    """The D datums of one request that a loss is taken over, end to end: n targets.

    D is all datums of the request for losses that say so (wire.losses, `whole_request`), else some of them.
    """

    inputs: Inputs  # each [n] float32, optional and recorded ones filled in
    shapes: tuple[tuple[int, ...], ...]  # per datum: (N,) or (N, K); the products sum to n
    config: Config  # defaults filled in
    seed: int  # of the request: the same when it is run again
    custom: CustomLoss | None = None
    own_inputs: tuple[Inputs, ...] = field(default=())
    """For `custom`: per datum what it reads beside logprobs, in the client's dtypes and shapes."""


LossFunction = Callable[[torch.Tensor, LossContext], LossTerms]
"""(target logprobs [n], context) -> terms."""


def policy_metrics(logprobs: torch.Tensor, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Of the tokens with an advantage: how many, and how far the policy is from the sampler (k1 estimate)."""
    active = inputs["advantages"] != 0
    return {
        "active_tokens:sum": active.sum(),
        "kl_sampler_policy:sum": ((inputs["logprobs"] - logprobs.detach()) * active).sum(),
    }


def clipped_tokens(ratio: torch.Tensor, kept: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return ((ratio != kept) & (inputs["advantages"] != 0)).sum()
