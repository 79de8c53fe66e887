"""Checkpoint loading into a model, tensor by tensor, whatever number of ranks saved it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from skyrl_tinker.domain.manifest import Manifest, read_manifest, verify_files
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StorageError, UserError
from skyrl_tinker.training.checkpoints.checkpoint_save import OPTIMIZER_STEM, key_of
from skyrl_tinker.training.checkpoints.tensor_files import SUFFIX
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.shortage import Shortage

Read = Callable[[str, slice], torch.Tensor]
"""(key, rows) -> these rows of the tensor. The files are open, so the checkpoint may be deleted meanwhile."""


def load(model: TrainableModel, directory: Path, *, optimizer: bool, ranks: Ranks) -> None:
    """Load weights in place and clear gradients; without `optimizer` its state starts from zero.

    Every rank must call it, after all of the files have passed `verify`. Raises UserError, StorageError or
    ExhaustedError, on all ranks alike and before anything is changed, when the checkpoint does not fit,
    cannot be read, or there is no memory for it.
    """
    with ExitStack() as files:
        manifest, read = ranks.together(lambda: _open(model, directory, optimizer, files))
        moments = _moments(model, manifest) if optimizer else ()
        if not moments:
            model.reset_optimizer()
        for part in (Part.WEIGHT, *moments):
            for name in model.shapes():
                model.share(part, name).copy_(read(key_of(part, name), model.rows(name)))
        model.bounds = None
        model.clear_gradients()
        model.step = manifest.step if optimizer else 0


def verify(directory: Path, rank: int, ranks: int) -> None:
    """Check one rank's share of the files. Raises UserError for a damaged checkpoint, and StorageError.

    No collective: with a slow disk the other ranks would time out.
    """
    with _read_errors(directory):
        manifest = read_manifest(directory)
        verify_files(directory, manifest, list(manifest.files)[rank::ranks])


def _open(model: TrainableModel, directory: Path, optimizer: bool, files: ExitStack) -> tuple[Manifest, Read]:
    with _read_errors(directory):
        manifest = read_manifest(directory)
        _require_fit(model, directory, manifest, optimizer)
        weights, moments = _names(manifest)
        opened = _open_files(directory, [*weights, *(moments if optimizer else ())], files)
    parts = (Part.WEIGHT, *(_moments(model, manifest) if optimizer else ()))
    _require_shapes(directory, model, parts, opened, manifest.spec)
    _require_memory(model, parts)
    return manifest, lambda key, rows: opened[key].get_slice(key)[rows]


@contextmanager
def _read_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"checkpoint '{directory}' cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"checkpoint '{directory}' is damaged: {error}") from error


def _require_fit(model: TrainableModel, directory: Path, manifest: Manifest, optimizer: bool) -> None:
    if optimizer and manifest.optimizer is None:
        raise UserError(f"checkpoint '{directory}' was saved without optimizer state")
    if optimizer and manifest.optimizer != model.optimizer:
        raise UserError(
            f"checkpoint '{directory}' has the state of the optimizer {manifest.optimizer}, this model has "
            f"{model.optimizer}: load it without optimizer state"
        )
    if manifest.spec.rank != model.spec.rank:
        raise UserError(
            f"checkpoint '{directory}': expected LoRA rank {model.spec.rank}, found {manifest.spec.rank}"
        )


def _names(manifest: Manifest) -> tuple[list[str], list[str]]:
    """Return the files of weights and those of the optimizer."""
    tensors = [name for name in manifest.files if name.endswith(SUFFIX)]
    moments = [name for name in tensors if name.startswith(OPTIMIZER_STEM)]
    return [name for name in tensors if name not in moments], moments


def _open_files(directory: Path, names: Iterable[str], files: ExitStack) -> dict[str, Any]:
    """Return the open file of each key."""
    opened: dict[str, Any] = {}
    for name in names:
        file = files.enter_context(safe_open(directory / name, "pt"))
        opened |= dict.fromkeys(file.keys(), file)
    return opened


def _require_shapes(
    directory: Path, model: TrainableModel, parts: tuple[Part, ...], opened: Mapping[str, Any], spec: LoraSpec
) -> None:
    """`spec`: of the checkpoint; if it adapts other layers, the error names these rather than a shape."""
    expected = {key_of(part, name): shape for part in parts for name, shape in model.shapes().items()}
    found = {key: tuple(file.get_slice(key).get_shape()) for key, file in opened.items()}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            for name in ("train_mlp", "train_attn", "train_unembed"):
                wanted, saved = getattr(model.spec, name), getattr(spec, name)
                if wanted != saved:
                    raise UserError(f"checkpoint '{directory}': {name}: expected {wanted}, found {saved}")
            raise UserError(
                f"checkpoint '{directory}': {key}: expected shape {expected.get(key)}, found {found.get(key)}"
            )


def _require_memory(model: TrainableModel, parts: tuple[Part, ...]) -> None:
    """Create missing moments. Raises ExhaustedError without memory for them or to read the largest share."""
    shortage = Shortage()
    if len(parts) > 1:
        shortage.survive(model.make_moments)
    largest = max(model.share(Part.WEIGHT, name).numel() for name in model.shapes())
    shortage.survive(lambda: torch.empty(largest))
    shortage.report()


def _moments(model: TrainableModel, manifest: Manifest) -> tuple[Part, ...]:
    """Return the optimizer's parts in the checkpoint: none before the first step, when all are zero."""
    return model.moments if manifest.step else ()
