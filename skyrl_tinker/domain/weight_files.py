"""Files of a model's weights in a directory, by Hugging Face's names."""

import json
from pathlib import Path

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """List the files that the index names, else model.safetensors; none where there is neither.

    Others are no part: repositories hold the same weights once more in other formats. ValueError when the
    index is damaged or names files that are not there.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        single = directory / WEIGHTS_FILE
        return [single] if single.is_file() else []
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error
    files = sorted(directory / name for name in names)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{index} names {', '.join(missing)}, which are not there")
    return files
