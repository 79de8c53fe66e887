"""A checkpoint of one in-process worker, step by step as TrainerGroup takes them."""

from pathlib import Path

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.training.worker import Worker


def save(worker: Worker, model: int, directory: Path, *, optimizer: bool = True) -> int:
    scratch = directory.with_name(f".{directory.name}.tmp")
    contents = worker.capture_state(ModelKey(model), 0, optimizer)
    files = worker.persist_state(0, str(scratch))
    return worker.commit_state(contents, files, str(scratch), str(directory))
