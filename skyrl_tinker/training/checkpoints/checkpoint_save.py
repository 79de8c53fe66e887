"""Checkpoint writing: safetensors and JSON, the same for any number of ranks, atomic by rename.

A LoRA checkpoint is also a PEFT adapter directory. A full one holds model.safetensors with the base model's
names, or shards and their index in Hugging Face's layout: ranks write in parallel, each whole tensors. The
optimizer's tensors, sharded likewise, and manifest.json are beside them. No pickle.

Three steps: `capture` while the trainer waits, `persist` on every rank while it trains on, and when all are
done `commit`, which makes the directory appear.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path

import torch

from skyrl_tinker.domain.manifest import CheckpointContents, FileEntry, Manifest, entry_of, write_manifest
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config
from skyrl_tinker.domain.weight_files import INDEX_FILE
from skyrl_tinker.errors import UserError
from skyrl_tinker.system.atomic_directory import publish
from skyrl_tinker.training.checkpoints.tensor_files import deal, shard_name, write_tensors
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.trainable_model import HostCopy, Part, TrainableModel
from skyrl_tinker.training.shortage import Shortage

FULL_STEM, OPTIMIZER_STEM = "model", "optimizer"

Tensors = dict[str, torch.Tensor]  # by key in the file


@dataclass(frozen=True, slots=True)
class Captured:
    """One rank's share of a checkpoint. `files`: by file name, tensors in host memory.

    The same on all ranks: `contents`, and `dealt`, by rank the shapes of the weights that it writes.
    """

    files: Mapping[str, Tensors]
    contents: CheckpointContents
    dealt: Sequence[Mapping[str, tuple[int, ...]]]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of weights in files. `shard_bytes`: approximate size of a file; None: one file per writing rank.

    `checked`: write a manifest with the files' checksums. `pinned`: copy a GPU's tensors to pinned memory.
    """

    dtype: torch.dtype = torch.float32
    shard_bytes: int | None = None
    checked: bool = True
    pinned: bool = False

    def shards(self, sizes: Mapping[str, int], writers: int) -> int:
        """Return the number of files. `sizes`: elements by tensor."""
        if self.shard_bytes is None:
            return writers
        return max(writers, ceil(sum(sizes.values()) * self.dtype.itemsize / self.shard_bytes))


STATE = Layout()


def key_of(part: Part, name: str) -> str:
    """Return the key of a tensor in its file."""
    return name if part is Part.WEIGHT else f"{name}.{part}"


def capture(
    model: TrainableModel,
    base_model: str,
    *,
    optimizer: bool,
    rank: int,
    world: int,
    layout: Layout = STATE,
    agree: Callable[[Shortage], object] = Shortage.report,
) -> Captured:
    """Copy the model as it is now. Every rank must call it: gathering is collective.

    Each rank keeps only the tensors that it will write; one whole tensor at a time is on the device. If
    memory runs out, `agree` raises ExhaustedError.
    """
    shortage = Shortage()
    shapes = model.shapes()
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    writers = _writers(model, world)
    shares = deal(sizes, layout.shards(sizes, writers))
    file_of = {name: index for index, share in enumerate(shares) for name in share}
    dealt = [
        {name: shapes[name] for share in shares[writer::writers] for name in share} for writer in range(world)
    ]
    own = dealt[rank]
    files: dict[str, Tensors] = {}
    for part in (Part.WEIGHT, *_moments(model, optimizer)):
        copies = model.host_copies(part, HostCopy(layout.dtype, layout.pinned), own, shortage)
        for name, copy in copies.items():
            file = files.setdefault(_file_name(model, part, file_of[name], len(shares)), {})
            file[key_of(part, name)] = copy
    if layout.pinned and torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    agree(shortage)
    contents = _contents(model, base_model, optimizer, shares, layout, writers)
    return Captured(files, contents, dealt, layout.dtype)


def persist(captured: Captured, scratch: Path) -> dict[str, FileEntry]:
    """Write this rank's files durably; no collective. Returns their manifest entries. Raises OSError."""
    scratch.mkdir(parents=True, exist_ok=True)
    for name, tensors in captured.files.items():
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        write_tensors(scratch / name, shapes, captured.dtype, tensors.values())
    checked = captured.contents.manifest is not None
    return {name: entry_of(scratch / name) for name in captured.files if checked}


def commit(
    contents: CheckpointContents, files: Mapping[str, FileEntry], scratch: Path, directory: Path
) -> int:
    """Publish the `files` that all ranks have persisted as a checkpoint; returns its size in bytes.

    Raises UserError when the directory exists, OSError when it cannot be written.
    """
    if directory.exists():
        raise UserError(f"a checkpoint cannot be written to '{directory}': the directory exists")
    for name, text in contents.texts.items():
        (scratch / name).write_text(text)
    if contents.manifest is not None:
        texts = {name: entry_of(scratch / name) for name in contents.texts}
        listed = dict(sorted({**files, **texts}.items()))
        write_manifest(scratch, replace(contents.manifest, files=listed))
    return publish(scratch, directory)


def _writers(model: TrainableModel, world: int) -> int:
    """Return the number of ranks that write: one for a LoRA model, which is small and whole on every rank."""
    return 1 if isinstance(model, LoraModel) else world


def _moments(model: TrainableModel, optimizer: bool) -> tuple[Part, ...]:
    """Return the optimizer's parts; none before the first step: reading would allocate their zeros."""
    return model.moments if optimizer and model.step else ()


def _file_name(model: TrainableModel, part: Part, index: int, count: int) -> str:
    if part is not Part.WEIGHT:
        return shard_name(OPTIMIZER_STEM, index, count)
    return ADAPTER_FILE if isinstance(model, LoraModel) else shard_name(FULL_STEM, index, count)


def _contents(
    model: TrainableModel,
    base_model: str,
    optimizer: bool,
    shares: list[list[str]],
    layout: Layout,
    writers: int,
) -> CheckpointContents:
    family = model.optimizer if optimizer else None
    manifest = Manifest(base_model, model.spec, model.step, family) if layout.checked else None
    if isinstance(model, LoraModel):
        config = adapter_config(model.shapes(), model.spec.rank, base_model, model.expert_rank)
        texts = {ADAPTER_CONFIG_FILE: _json(config)}
    else:
        texts = {INDEX_FILE: _json(_index(model, shares, layout.dtype))} if len(shares) > 1 else {}
    return CheckpointContents(manifest, texts, writers)


def _index(model: TrainableModel, shares: list[list[str]], dtype: torch.dtype) -> dict[str, object]:
    """Return the content of model.safetensors.index.json."""
    size = sum(prod(shape) for shape in model.shapes().values()) * dtype.itemsize
    files = {
        name: shard_name(FULL_STEM, index, len(shares))
        for index, share in enumerate(shares)
        for name in share
    }
    return {"metadata": {"total_size": size}, "weight_map": files}


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=1) + "\n"
