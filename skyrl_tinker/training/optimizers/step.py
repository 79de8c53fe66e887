"""One optimizer step of one model, by the optimizer that the model was created with."""

import math
from dataclasses import asdict

import torch

from skyrl_tinker.domain.values import AdamParams, DimuonParams, StepItem, StepOutput
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.optimizers import adamw, dimuon
from skyrl_tinker.training.optimizers.float_range import LARGEST
from skyrl_tinker.training.shortage import Shortage


def optim_step(model: TrainableModel, item: StepItem, ranks: Ranks) -> StepOutput:
    """Apply the accumulated gradients and clear them. Every rank must call it.

    Without gradients nothing changes, not even the step count; a refused step drops the gradients. Raises
    ExhaustedError, on all ranks alike, and nothing has changed.
    """
    if item.params.family != model.optimizer:
        model.clear_gradients()
        return StepOutput(item.request_id, {}, _mismatch(model, item.params))
    if not model.has_gradients:
        return StepOutput(item.request_id, _metrics(model, item, 0.0) | {"no_gradients": 1.0})
    shortage = Shortage()
    shortage.survive(model.make_moments)
    if model.optimizer == "dimuon":
        shortage.survive(lambda: dimuon.reserve(model, ranks))
    shortage.agree(ranks)
    gradients, reduced = model.reduced_gradients(ranks)
    norm = float(reduced)
    error = _apply(model, gradients, item.params, norm, ranks)
    if error is None:
        model.step += 1
    model.clear_gradients()
    return StepOutput(item.request_id, _metrics(model, item, norm), error)


def _apply(
    model: TrainableModel,
    gradients: list[torch.Tensor],
    params: AdamParams | DimuonParams,
    norm: float,
    ranks: Ranks,
) -> str | None:
    """Make the step; return an error instead, with nothing but the gradients changed."""
    if not math.isfinite(norm):
        return f"the gradients are not finite (global norm {norm}): the step was refused, they were dropped"
    clipped = _clip(gradients, norm, params.grad_clip_norm)
    match params:
        case AdamParams():
            beyond = adamw.apply(model, gradients, clipped, params, ranks)
        case DimuonParams():
            beyond = dimuon.apply(model, gradients, clipped, params, ranks)
    return _out_of_range(beyond, clipped, params) if beyond else None


def _clip(gradients: list[torch.Tensor], norm: float, limit: float) -> float:
    """Clip by the model's global `norm`, as clip_grad_norm_ of torch, 1e-6 included. Off for limit <= 0.

    Return the norm after clipping.
    """
    factor = limit / (norm + 1e-6)
    if not (limit > 0 and factor < 1):
        return norm
    torch._foreach_mul_(gradients, factor)
    return norm * factor


def _out_of_range(beyond: list[Part], norm: float, params: AdamParams | DimuonParams) -> str:
    values = {key: value for key, value in asdict(params).items() if key != "grad_clip_norm"}
    return (
        f"the step would push {' and '.join(beyond)} beyond float32 (at most {LARGEST:.3g}), with a global "
        f"norm of {norm:.3g} of the gradients after clipping and "
        f"{', '.join(f'{key} {value:g}' for key, value in values.items())}: expected smaller values "
        "(grad_clip_norm bounds the norm); the step was refused, the gradients were dropped"
    )


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
