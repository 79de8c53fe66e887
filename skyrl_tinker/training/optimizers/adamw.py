"""AdamW (arXiv:1711.05101) with torch.optim.AdamW's arithmetic."""

import math

import torch
from torch.optim.adamw import adamw

from skyrl_tinker.domain.values import AdamParams
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.optimizers.float_range import LARGEST, Bounds, doubtful_parts

_PARTS = (Part.WEIGHT, Part.EXP_AVG, Part.EXP_AVG_SQ)
_CHUNK = 1 << 24
"""Entries of a tensor that a trial copies at once."""


def apply(
    model: TrainableModel, gradients: list[torch.Tensor], norm: float, params: AdamParams, ranks: Ranks
) -> list[Part]:
    """Update the weights by this rank's gradients, summed over ranks and clipped to the global `norm`.

    Changes nothing where values would leave float32's range: returns the parts that would. Every rank must
    call it.
    """
    if doubtful_parts(model, lambda bounds: _bounds_after(bounds, model.step, norm, params), ranks):
        model.bounds = None
        if beyond := _try(model, gradients, params, ranks):
            return beyond
    _update(params, model.step, gradients, *(model.local(part) for part in _PARTS))
    return []


def _update(
    params: AdamParams,
    step: int,
    gradients: list[torch.Tensor],
    weights: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
) -> None:
    adamw(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        list(torch.full((len(weights),), float(step), device=weights[0].device)),  # the kernel adds 1 to each
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
    )


def _bounds_after(bounds: Bounds, step: int, norm: float, params: AdamParams) -> Bounds:
    """Return bounds after a step; moments are averages, and each part of an update is in range too."""
    exp_avg = max(bounds[Part.EXP_AVG], norm)
    rate = params.learning_rate / (1 - params.beta1 ** (step + 1))
    decay = params.learning_rate * params.weight_decay
    quotient = exp_avg / params.eps
    weight = bounds[Part.WEIGHT] * max(1.0, decay - 1) + rate * quotient
    return {
        Part.WEIGHT: weight if max(rate, decay, quotient) <= LARGEST else math.inf,
        Part.EXP_AVG: exp_avg,
        Part.EXP_AVG_SQ: max(bounds[Part.EXP_AVG_SQ], norm * norm),
    }


def _try(
    model: TrainableModel, gradients: list[torch.Tensor], params: AdamParams, ranks: Ranks
) -> list[Part]:
    """Make the step in copies, some entries at a time; return the parts that would not be finite."""
    beyond = torch.zeros(len(_PARTS), dtype=torch.bool, device=ranks.device)
    for tensors in zip(gradients, *(model.local(part) for part in _PARTS), strict=True):
        for pieces in zip(*(tensor.flatten().split(_CHUNK) for tensor in tensors), strict=True):
            gradient, *copies = (piece.clone() for piece in pieces)
            _update(params, model.step, [gradient], *([copy] for copy in copies))
            beyond |= torch.stack([~copy.isfinite().all() for copy in copies])
    return [part for part, flag in zip(_PARTS, ranks.any_(beyond.tolist()), strict=True) if flag]
