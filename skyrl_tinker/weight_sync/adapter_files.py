"""LoRA weights to the samplers: one immutable PEFT directory per version."""

import json
import os
import shutil
from pathlib import Path

from safetensors.numpy import save_file

from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config
from skyrl_tinker.domain.values import AdapterWeights


def publish_adapter(weights: AdapterWeights, directory: Path, base_model: str) -> int:
    """Write the adapter so that `directory` exists only complete; returns its size in bytes.

    A directory that is there already, from an attempt that was not recorded, is replaced.
    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        size = _write(weights, temporary, base_model)
    except BaseException:  # what filled the disk must not go on filling it
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
    flush(directory.parent)
    return size


def _write(weights: AdapterWeights, directory: Path, base_model: str) -> int:
    directory.mkdir(parents=True)
    save_file(dict(weights.tensors), directory / ADAPTER_FILE, metadata={"format": "pt"})
    config = adapter_config(weights.tensors, weights.spec.rank, base_model)
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=1))
    for path in (*directory.iterdir(), directory):
        flush(path)
    return sum(file.stat().st_size for file in directory.iterdir())


def flush(path: Path) -> None:
    """A file's content or a directory's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
