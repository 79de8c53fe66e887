"""Full-parameter weights in one file, for the samplers: streamed, nothing is kept."""

from pathlib import Path

import torch

from skyrl_tinker.atomic_directory import storage_errors
from skyrl_tinker.domain.weight_files import WEIGHTS_FILE
from skyrl_tinker.training.checkpoints.tensor_files import write_tensors
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel


def write_weights(model: TrainableModel, directory: Path, dtype: torch.dtype, *, writer: bool) -> None:
    """Write the weights to directory/model.safetensors; every rank calls it, the `writer` writes.

    Raises StorageError when they cannot be written.
    """
    weights = (model.read(Part.WEIGHT, name) for name in model.shapes())
    try:
        if writer:
            with storage_errors("the weights could not be written"):
                directory.mkdir(parents=True, exist_ok=True)
                write_tensors(directory / WEIGHTS_FILE, model.shapes(), dtype, weights)
    finally:  # gathering is collective: a rank that does not write, or fails to, takes part all the same
        for _ in weights:
            pass
