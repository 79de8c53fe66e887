"""A plain Hugging Face mixture whose routers choose given experts."""

from functools import partial
from typing import Any

import numpy as np
import torch

from skyrl_tinker.domain.values import ReplayedExperts


def force_experts(model: Any, given: ReplayedExperts) -> None:
    """Have the routers choose these for the tokens of the next sequence, where they are known."""
    for layer, block in enumerate(model.model.layers):
        experts = torch.tensor(given.experts[:, layer].astype(np.int64))
        known = torch.tensor(given.known)[:, None]
        block.mlp.gate.forward = partial(_route, block.mlp.gate, experts, known)


def _route(
    router: Any, experts: torch.Tensor, known: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    logits = x @ router.weight.T
    scores = logits.softmax(-1)
    chosen = torch.where(known, experts, scores.topk(experts.shape[1]).indices)
    weights = torch.stack([scores[row, chosen[row]] for row in range(len(scores))])
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen
