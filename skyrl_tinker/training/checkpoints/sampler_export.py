"""A full-parameter model's weights in one file, for the samplers: streamed, nothing is kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from skyrl_tinker.errors import StorageError
from skyrl_tinker.training.checkpoints.tensor_file import sync, write_tensors
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel

FILE = "model.safetensors"


def write_weights(model: TrainableModel, directory: Path, dtype: torch.dtype, *, writer: bool) -> None:
    """The weights alone, to directory/model.safetensors; every rank calls it, the `writer` writes.

    Raises StorageError when they cannot be written.
    """
    source = (model.read(Part.WEIGHT, name) for name in model.shapes())
    if not writer:
        _exhaust(source)
        return
    with _writing(source):
        directory.mkdir(parents=True, exist_ok=True)
        scratch = directory / f".{FILE}.tmp"
        write_tensors(scratch, model.shapes(), dtype, source)
        scratch.replace(directory / FILE)
        sync(directory)


def _exhaust(source: Iterator[torch.Tensor]) -> None:
    """Gathering is collective: ranks that write nothing take part all the same."""
    for _ in source:
        pass


@contextmanager
def _writing(source: Iterator[torch.Tensor]) -> Iterator[None]:
    """A full disk fails this save alone: the peers, who gather on, are not left waiting."""
    try:
        yield
    except OSError as error:
        _exhaust(source)
        raise StorageError(f"the weights could not be written: {error.strerror or error}") from error
