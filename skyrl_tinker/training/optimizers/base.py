"""What all optimizers share: clipping, and why a step is refused."""

import torch

from skyrl_tinker.domain.values import AdamParams, DimuonParams
from skyrl_tinker.training.models.trainable_model import TrainableModel


def clip(gradients: list[torch.Tensor], norm: float, limit: float) -> None:
    """As torch.nn.utils.clip_grad_norm_, 1e-6 included; `norm` is the model's global one. Off for
    limit <= 0."""
    factor = limit / (norm + 1e-6)
    if limit > 0 and factor < 1:
        torch._foreach_mul_(gradients, factor)


def not_finite(norm: float) -> str:
    return f"the gradients are not finite (global norm {norm}): the step was refused, they were dropped"


def other_optimizer(model: TrainableModel, params: AdamParams | DimuonParams) -> str:
    return (
        f"optim_step has parameters of {params.family}, expected those of {model.optimizer}, which the model "
        "was made with (optimizer_config): the step was refused, the gradients of its window were dropped"
    )
