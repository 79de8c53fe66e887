"""LoRA weights to the samplers: one immutable PEFT directory per version."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from skyrl_tinker.wire.values import AdapterWeights

ALPHA = 32
"""The LoRA delta is scaled by ALPHA / rank, in the trainer and here."""


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
    _flush(directory.parent)
    return size


def _write(weights: AdapterWeights, directory: Path, base_model: str) -> int:
    directory.mkdir(parents=True)
    save_file(dict(weights.tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(_config(weights, base_model), indent=2) + "\n")
    for path in (*directory.iterdir(), directory):
        _flush(path)
    return sum(file.stat().st_size for file in directory.iterdir())


def _config(weights: AdapterWeights, base_model: str) -> dict[str, Any]:
    modules = {name.removesuffix(".weight").rsplit(".", 2)[-2] for name in weights.tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": weights.spec.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(modules),
    }


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
