"""AdamW (arXiv:1711.05101) with torch.optim.AdamW's arithmetic."""

import torch
from torch.optim.adamw import adamw

from skyrl_tinker.domain.values import AdamParams
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel


def apply(model: TrainableModel, gradients: list[torch.Tensor], params: AdamParams) -> None:
    """Update the weights by this rank's gradients, summed over ranks and clipped."""
    weights = model.local(Part.WEIGHT)
    adamw(
        weights,
        gradients,
        model.local(Part.EXP_AVG),
        model.local(Part.EXP_AVG_SQ),
        [],
        [torch.tensor(float(model.step), device=weight.device) for weight in weights],  # the kernel adds 1
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
    )
