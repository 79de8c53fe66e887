"""Files of LoRA weights for the samplers: one immutable PEFT directory per version."""

import json
import shutil
from pathlib import Path

from safetensors.numpy import save

from skyrl_tinker.atomic_directory import atomic_directory
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config
from skyrl_tinker.domain.values import AdapterWeights


def publish_adapter(weights: AdapterWeights, directory: Path, base_model: str) -> None:
    """Write the adapter so that `directory` exists only complete; one from an earlier attempt is replaced."""
    with atomic_directory(directory) as staging:
        write_adapter(weights, staging, base_model)
        shutil.rmtree(directory, ignore_errors=True)


def write_adapter(weights: AdapterWeights, directory: Path, base_model: str) -> None:
    """Write the adapter's files into an existing directory."""
    content = save(dict(weights.tensors), metadata={"format": "pt"})
    (directory / ADAPTER_FILE).write_bytes(content)  # an OSError, which save_file hides
    config = adapter_config(weights.tensors, weights.spec.rank, base_model)
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=1))
