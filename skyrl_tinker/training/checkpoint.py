"""Checkpoints: safetensors and JSON, the same for any number of ranks, atomic by rename. No pickle.

A LoRA checkpoint is a PEFT adapter directory as well, a full one holds model.safetensors with the
names of the base; beside them optimizer.safetensors and manifest.json.
"""

import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from skyrl_tinker.errors import StorageError, UserError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.lora import LoraModel
from skyrl_tinker.training.manifest import (
    FILE_NAME,
    Manifest,
    entry_of,
    read_manifest,
    verify_files,
    write_manifest,
)
from skyrl_tinker.training.state import MOMENTS, Part, TrainableModel
from skyrl_tinker.training.tensor_file import sync, write_tensors
from skyrl_tinker.wire.peft import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config

OPTIMIZER_FILE = "optimizer.safetensors"
FULL_FILE = "model.safetensors"


def save(model: TrainableModel, directory: Path, base_model: str, *, optimizer: bool, ranks: Ranks) -> int:
    """Write a complete checkpoint; every rank calls it, rank 0 writes. Returns bytes (0 elsewhere).

    Raises UserError when the directory is there already, StorageError when it cannot be written.
    """
    writer = ranks.rank == 0
    if any(ranks.any_([writer and directory.exists()])):  # asked of one rank: soon it will exist
        raise UserError(f"a checkpoint can not be written to {directory}: it exists")
    files = [(_weights_file(model), (Part.WEIGHT,)), *([(OPTIMIZER_FILE, MOMENTS)] if optimizer else [])]
    sources = [_read(model, parts) for _, parts in files]
    if not writer:
        _exhaust(sources)
        return 0
    scratch = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    try:
        with _writing(sources):
            scratch.mkdir(parents=True)
            for (name, parts), source in zip(files, sources, strict=True):
                write_tensors(scratch / name, _shapes(model, parts), torch.float32, source)
            _finish(model, scratch, base_model, optimizer)
            scratch.rename(directory)
            sync(directory.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return sum(file.stat().st_size for file in directory.iterdir())


def load(model: TrainableModel, directory: Path, *, optimizer: bool) -> None:
    """In place, gradients are cleared; without `optimizer` its state starts anew.

    Raises UserError, before anything is changed, when the checkpoint is damaged or does not fit.
    """
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    _require_fit(model, directory, manifest, optimizer)
    _fill(model, directory / _weights_file(model), (Part.WEIGHT,))
    model.clear_gradients()
    model.reset_optimizer()
    if optimizer:
        _fill(model, directory / OPTIMIZER_FILE, MOMENTS)
        model.step = manifest.step


def write_weights(model: TrainableModel, directory: Path, dtype: torch.dtype, *, writer: bool) -> None:
    """The weights alone, to directory/model.safetensors; every rank calls it, the `writer` writes.

    Raises StorageError when they cannot be written.
    """
    parts = (Part.WEIGHT,)
    source = _read(model, parts)
    if not writer:
        _exhaust([source])
        return
    with _writing([source]):
        directory.mkdir(parents=True, exist_ok=True)
        scratch = directory / f".{FULL_FILE}.tmp"
        write_tensors(scratch, _shapes(model, parts), dtype, source)
        scratch.replace(directory / FULL_FILE)
        sync(directory)


def _weights_file(model: TrainableModel) -> str:
    return ADAPTER_FILE if isinstance(model, LoraModel) else FULL_FILE


def _key(part: Part, name: str) -> str:
    return name if part is Part.WEIGHT else f"{name}.{part}"


def _shapes(model: TrainableModel, parts: tuple[Part, ...]) -> Mapping[str, tuple[int, ...]]:
    return {_key(part, name): shape for part in parts for name, shape in model.shapes().items()}


def _read(model: TrainableModel, parts: tuple[Part, ...]) -> Iterator[torch.Tensor]:
    return (model.read(part, name) for part in parts for name in model.shapes())


def _exhaust(sources: Iterable[Iterator[torch.Tensor]]) -> None:
    """Gathering is collective: ranks that write nothing take part all the same."""
    for source in sources:
        for _ in source:
            pass


@contextmanager
def _writing(sources: Iterable[Iterator[torch.Tensor]]) -> Iterator[None]:
    """A full disk fails this save alone: the peers, who gather on, are not left waiting."""
    try:
        yield
    except OSError as error:
        _exhaust(sources)
        raise StorageError(f"the weights could not be written: {error.strerror or error}") from error


def _finish(model: TrainableModel, scratch: Path, base_model: str, optimizer: bool) -> None:
    if isinstance(model, LoraModel):
        text = json.dumps(adapter_config(model.shapes(), model.spec.rank, base_model), indent=1)
        (scratch / ADAPTER_CONFIG_FILE).write_text(text + "\n")
    files = {file.name: entry_of(file) for file in sorted(scratch.iterdir())}
    write_manifest(scratch, Manifest(base_model, model.spec, model.step, optimizer, files))
    for name in (ADAPTER_CONFIG_FILE, FILE_NAME):
        if (scratch / name).exists():
            sync(scratch / name)
    sync(scratch)


def _require_fit(model: TrainableModel, directory: Path, manifest: Manifest, optimizer: bool) -> None:
    if optimizer and not manifest.has_optimizer:
        raise UserError(f"checkpoint {directory} was saved without optimizer state")
    if manifest.spec.rank != model.spec.rank:
        raise UserError(
            f"checkpoint {directory}: expected LoRA rank {model.spec.rank}, found {manifest.spec.rank}"
        )
    files = [(_weights_file(model), (Part.WEIGHT,)), *([(OPTIMIZER_FILE, MOMENTS)] if optimizer else [])]
    for name, parts in files:
        _require_shapes(directory / name, _shapes(model, parts))


def _require_shapes(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    with safe_open(path, "pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise UserError(
                f"checkpoint {path}: {key}: expected shape {expected.get(key)}, found {found.get(key)}"
            )


def _fill(model: TrainableModel, path: Path, parts: tuple[Part, ...]) -> None:
    with safe_open(path, "pt") as file:
        for part in parts:
            for name in model.shapes():
                model.write(part, name, file.get_tensor(_key(part, name)))
