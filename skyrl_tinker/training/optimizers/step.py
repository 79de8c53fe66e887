"""One optimizer step of one model, by the optimizer that the model was created with."""

import math

import torch

from skyrl_tinker.domain.values import AdamParams, DimuonParams, StepItem, StepOutput
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import TrainableModel
from skyrl_tinker.training.optimizers import adamw, dimuon


def optim_step(model: TrainableModel, item: StepItem, ranks: Ranks) -> StepOutput:
    """Apply the accumulated gradients and clear them. Every rank must call it.

    Without gradients nothing changes, not even the step count; a refused step drops the gradients.
    """
    if item.params.family != model.optimizer:
        model.clear_gradients()
        return StepOutput(item.request_id, {}, _mismatch(model, item.params))
    if not model.has_gradients:
        return StepOutput(item.request_id, _metrics(model, item, 0.0) | {"no_gradients": 1.0})
    gradients, reduced = model.reduced_gradients(ranks)
    norm = float(reduced)
    error = None
    if math.isfinite(norm):
        _clip(gradients, norm, item.params.grad_clip_norm)
        _apply(model, gradients, item.params, ranks)
        model.step += 1
    else:
        error = f"the gradients are not finite (global norm {norm}): the step was refused, they were dropped"
    model.clear_gradients()
    return StepOutput(item.request_id, _metrics(model, item, norm), error)


def _apply(
    model: TrainableModel, gradients: list[torch.Tensor], params: AdamParams | DimuonParams, ranks: Ranks
) -> None:
    match params:
        case AdamParams():
            adamw.apply(model, gradients, params)
        case DimuonParams():
            dimuon.apply(model, gradients, params, ranks)


def _clip(gradients: list[torch.Tensor], norm: float, limit: float) -> None:
    """Clip by the model's global `norm`, as clip_grad_norm_ of torch, 1e-6 included. Off for limit <= 0."""
    factor = limit / (norm + 1e-6)
    if limit > 0 and factor < 1:
        torch._foreach_mul_(gradients, factor)


def _mismatch(model: TrainableModel, params: AdamParams | DimuonParams) -> str:
    return (
        f"optim_step has parameters of {params.family}, expected those of {model.optimizer}, which the model "
        "was made with (optimizer_config): the step was refused, the gradients of its window were dropped"
    )


def _metrics(model: TrainableModel, item: StepItem, norm: float) -> dict[str, float]:
    # not "step": clients log these beside their own metrics, where "step" is the loop's
    return {
        "grad_norm": norm,
        "learning_rate": item.params.learning_rate,
        "optimizer_step": float(model.step),
    }
