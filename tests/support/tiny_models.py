"""Tiny models of any family with weights in which mistakes show."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from skyrl_tinker.server.base_models.tiny_model import make_model


def write_tiny(
    directory: Path,
    *,
    arch: str = "qwen3",
    layers: int = 2,
    vocab: int = 512,
    tied: bool = True,
    seed: int = 0,
    **config: Any,
) -> None:
    """Matrices ten times the usual, norms and biases that are not all alike. `config`: other entries."""
    make_model(directory, arch=arch, hidden=64, layers=layers, vocab=vocab, tied=tied, seed=seed)
    rng = np.random.default_rng(seed)
    tensors = {
        name: value * 10 if value.ndim == 2 else value + rng.normal(0, 0.2, value.shape).astype(np.float32)
        for name, value in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
