"""Checkpoints and weights for samplers, step by step as TrainerGroup takes them, and read back."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import load_file

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.training.worker import Worker


def save(worker: Worker, model: int, directory: Path, *, optimizer: bool = True) -> int:
    """Save a checkpoint of one in-process worker."""
    scratch = directory.with_name(f".{directory.name}.tmp")
    worker.capture_state(ModelKey(model), 0, optimizer)
    return worker.write_state(0, str(scratch), str(directory))


def write_weights(worker: Worker, model: int, directory: Path, *, durable: bool = False) -> None:
    """Write what samplers get from one in-process worker."""
    key, scratch = ModelKey(model), directory.with_name(f".{directory.name}.tmp")
    worker.capture_weights({key: 0}, {key: durable})
    worker.write_state(0, str(scratch), str(directory))
    worker.drop_captured(0)


async def save_state(group: TrainerGroup, model: ModelKey, directory: str, *, optimizer: bool) -> int:
    """Save a checkpoint; return its bytes."""
    captured = await group.capture_state(model, optimizer=optimizer)
    try:
        return await group.persist_state(captured, directory)
    finally:
        await captured.drop()


async def publish_weights(group: TrainerGroup, model: int, directory: Path) -> None:
    """Write what samplers get."""
    key = ModelKey(model)
    captured = (await group.capture_weights({key: False}))[key]
    try:
        await group.persist_state(captured, str(directory))
    finally:
        await captured.drop()


async def published_weights(group: TrainerGroup, model: int) -> dict[str, np.ndarray]:
    """Return what samplers get."""
    with TemporaryDirectory() as directory:
        await publish_weights(group, model, Path(directory) / "weights")
        return read_weights(Path(directory) / "weights")


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors of all files."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}
