"""Covariance of advantage and logprob, highest for tokens that change the policy's entropy most.

arXiv:2505.22617.
"""

import torch


def covariances(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Compute (A - mean A) * (logp - mean logp), [n], without gradient; -inf where A = 0.

    The means go over the tokens with A != 0, as there is no mask that names the sampled ones. In float64:
    sums of advantages may be beyond float32.
    """
    counted = advantages != 0
    product = _centred(advantages.double(), counted) * _centred(logprobs.detach().double(), counted)
    return torch.where(counted, product, -torch.inf)


def share(fraction: float, count: int) -> int:
    """Return a number of `count` tokens: at least one, as in the authors' code, unless the fraction is 0."""
    return max(1, int(fraction * count)) if fraction and count else 0


def _centred(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return values - torch.where(counted, values, 0.0).sum() / counted.sum().clamp(min=1)
