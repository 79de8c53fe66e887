"""One AdamW step (arXiv:1711.05101) of one model, with torch.optim.AdamW's arithmetic."""

import math

import torch
from torch.optim.adamw import adamw

from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.state import Part, TrainableModel
from skyrl_tinker.wire.values import AdamParams, StepItem, StepOutput


def optim_step(model: TrainableModel, item: StepItem, ranks: Ranks) -> StepOutput:
    """Apply the accumulated gradients and clear them. Every rank must call it.

    Without gradients nothing changes, the step count neither; non-finite gradients are dropped.
    """
    adam = item.adam
    if not model.has_gradients:
        return StepOutput(item.request_id, _metrics(model, adam, 0.0) | {"no_gradients": 1.0})
    gradients, reduced = model.reduced_gradients(ranks)
    norm = float(reduced)
    error = None
    if math.isfinite(norm):
        _clip(gradients, norm, adam.grad_clip_norm)
        _apply(model, gradients, adam)
    else:
        error = f"the gradients are not finite (global norm {norm}): the step was refused, they were dropped"
    model.clear_gradients()
    return StepOutput(item.request_id, _metrics(model, adam, norm), error)


def _metrics(model: TrainableModel, adam: AdamParams, norm: float) -> dict[str, float]:
    # not "step": clients log these beside their own metrics, where that is the loop's step
    return {"grad_norm": norm, "learning_rate": adam.learning_rate, "optimizer_step": float(model.step)}


def _clip(gradients: list[torch.Tensor], norm: float, limit: float) -> None:
    """As torch.nn.utils.clip_grad_norm_, 1e-6 included; 0 = off."""
    factor = limit / (norm + 1e-6)
    if limit > 0 and factor < 1:
        torch._foreach_mul_(gradients, factor)


def _apply(model: TrainableModel, gradients: list[torch.Tensor], adam: AdamParams) -> None:
    weights = model.local(Part.WEIGHT)
    adamw(
        weights,
        gradients,
        model.local(Part.EXP_AVG),
        model.local(Part.EXP_AVG_SQ),
        [],
        [torch.tensor(float(model.step), device=weight.device) for weight in weights],  # it adds the 1 itself
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=adam.beta1,
        beta2=adam.beta2,
        lr=adam.learning_rate,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
    )
    model.step += 1
