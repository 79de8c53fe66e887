"""One optimizer step of one model, by the optimizer that it was made with: a small module for each."""

import math

import torch

from skyrl_tinker.domain.values import AdamParams, DimuonParams, StepItem, StepOutput
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import TrainableModel
from skyrl_tinker.training.optimizers import adamw, dimuon
from skyrl_tinker.training.optimizers.base import clip, not_finite, other_optimizer

__all__ = ["optim_step"]


def optim_step(model: TrainableModel, item: StepItem, ranks: Ranks) -> StepOutput:
    """Apply the accumulated gradients and clear them. Every rank must call it.

    Without gradients nothing changes, the step count neither; a step that is refused drops them.
    """
    if item.params.family != model.optimizer:
        model.clear_gradients()
        return StepOutput(item.request_id, {}, other_optimizer(model, item.params))
    if not model.has_gradients:
        return StepOutput(item.request_id, _metrics(model, item, 0.0) | {"no_gradients": 1.0})
    gradients, reduced = model.reduced_gradients(ranks)
    norm = float(reduced)
    error = None if math.isfinite(norm) else not_finite(norm)
    if error is None:
        clip(gradients, norm, item.params.grad_clip_norm)
        _apply(model, gradients, item.params)
        model.step += 1
    model.clear_gradients()
    return StepOutput(item.request_id, _metrics(model, item, norm), error)


def _apply(model: TrainableModel, gradients: list[torch.Tensor], params: AdamParams | DimuonParams) -> None:
    match params:
        case AdamParams():
            adamw.apply(model, gradients, params)
        case DimuonParams():
            dimuon.apply(model, gradients, params)


def _metrics(model: TrainableModel, item: StepItem, norm: float) -> dict[str, float]:
    # not "step": clients log these beside their own metrics, where that is the loop's step
    return {
        "grad_norm": norm,
        "learning_rate": item.params.learning_rate,
        "optimizer_step": float(model.step),
    }
