"""Weights in several files."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from skyrl_tinker.domain.weight_files import INDEX_FILE


def write_index(directory: Path, shards: Sequence[Iterable[str]]) -> list[Path]:
    """Write the index of shards that hold tensors of these names; return the paths of the shards."""
    paths = [
        directory / f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))
    ]
    names = {name: path.name for path, shard in zip(paths, shards, strict=True) for name in shard}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return paths
