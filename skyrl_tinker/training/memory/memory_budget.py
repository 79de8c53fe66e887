"""Memory of models: held, reserved, and the check that one more full copy fits."""

from collections.abc import Iterable

import torch

from skyrl_tinker.domain.units import GB
from skyrl_tinker.domain.values import OptimizerFamily
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.memory.offload import storages
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.trainable_model import MOMENTS, TrainableModel

_FLOAT32 = 4  # bytes


def bytes_held(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes on this rank's device now, offloaded tensors excluded."""
    return sum(storage.nbytes() for storage in storages(tensors))


def bytes_reserved(models: Iterable[TrainableModel], ranks: Ranks) -> float:
    """Count this rank's bytes of gradients and moments that full-parameter models have yet to allocate."""
    full = [model for model in models if isinstance(model, FullModel)]
    sizes = [sum(parameter.numel() for parameter in model.network.parameters()) for model in full]
    return sum(
        max(0.0, _whole(size, model.optimizer, ranks) - bytes_held(model.tensors()))
        for size, model in zip(sizes, full, strict=True)
    )


def require_memory(
    parameters: int, optimizer: OptimizerFamily, models: Iterable[TrainableModel], ranks: Ranks
) -> None:
    """Require memory for a full-parameter model of that many parameters, beside `models`.

    Every rank must call it. Raises UserError with the numbers, on all ranks alike, when there is too little.
    """
    needed = _whole(parameters, optimizer, ranks)
    reserved = bytes_reserved(models, ranks)
    free = allocator.free_bytes(ranks)
    if any(ranks.any_([needed > free - reserved])):
        raise UserError(
            f"full-parameter training (rank 0) of {parameters:,} parameters with {optimizer} needs "
            f"{needed / GB:.3g} GB per trainer rank; {free / GB:.3g} GB are free, of which "
            f"{reserved / GB:.3g} GB are reserved for full-parameter models: use LoRA, wait until "
            "one of them is released, or give the server more ranks or memory"
        )


def _whole(parameters: int, optimizer: OptimizerFamily, ranks: Ranks) -> float:
    """Bytes of weights, gradients and moments of one rank's share."""
    return parameters * _FLOAT32 * (2 + len(MOMENTS[optimizer])) / ranks.world
