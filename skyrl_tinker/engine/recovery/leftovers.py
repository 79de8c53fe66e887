"""Leftovers of a dead engine: half-written directories, and models that cannot return."""

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, ModelKey, ModelState
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.domain.weight_files import weight_files
from skyrl_tinker.store import checkpoint_records, model_records, server_state
from skyrl_tinker.store.futures import finish, queue
from skyrl_tinker.store.model_records import ModelRow

_log = logging.getLogger(__name__)
_TRAINED = "trained_base_model"
_HEAD_BYTES = 1 << 20
_OF_SAVE = re.compile(r"[^.~][^~]*~(\d+)(?:\.\w+)?")
PARTIAL = (".*.partial", ".*.tmp")  # directories that were being written
OF_OTHERS = ("copy-*", "import-*")
"""Directories under the checkpoints that the API and `import-adapter` write, and then record."""
OF_OTHERS_PARTIAL = tuple(f".{pattern}" for pattern in OF_OTHERS)
"""Those that are being written, or were when their writer died."""
UNRECORDED_S = 86400.0
"""Age from which nobody will record one of these any more."""


def sweep_partial(directories: Iterable[Path]) -> None:
    """Remove what an engine left half written."""
    for directory in directories:
        for path in (path for pattern in PARTIAL for path in directory.glob(pattern)):
            if not any(path.match(pattern) for pattern in OF_OTHERS_PARTIAL):
                shutil.rmtree(path, ignore_errors=True)


def sweep_unrecorded(root: Path, recorded: Iterable[str]) -> None:
    """Remove copies and imports without a checkpoint: their writer died, or it was the last one in there."""
    kept = {parent for directory in recorded for parent in Path(directory).parents}
    patterns = (*OF_OTHERS, *OF_OTHERS_PARTIAL)
    for path in (path for pattern in patterns for path in root.glob(pattern)):
        if path not in kept and path.stat().st_mtime < time.time() - UNRECORDED_S:
            shutil.rmtree(path, ignore_errors=True)


def remove(directories: Iterable[Path]) -> None:
    for directory in directories:
        _log.info("%s goes: no checkpoint has it", directory)
        shutil.rmtree(directory, ignore_errors=True)


def list_saves(root: Path) -> dict[Path, tuple[ModelKey, int]]:
    """Return the directories of saves, each with its model and the future id of the save."""
    found: dict[Path, tuple[ModelKey, int]] = {}
    for path in root.glob("*/*/*"):
        name, model = _OF_SAVE.fullmatch(path.name), path.parent.parent.name
        if name is not None and model.isdecimal():
            found[path] = ModelKey(int(model)), int(name[1])
    return found


def list_abandoned(conn: Connection, saves: Mapping[Path, tuple[ModelKey, int]]) -> list[Path]:
    """Return those directories that nobody will record: their try of a save died, or their removal did.

    Those of saves that this database does not know stay: it may be an older copy of the one that does. Call
    it in a write, after the directories were listed: an engine that was replaced meanwhile is refused.
    """
    directories = checkpoint_records.list_directories(conn)
    known = queue.saves_among(conn, [number for _, number in saves.values()])
    return [
        path
        for path, save in saves.items()
        if (removed := directories.get(str(path))) or (removed is None and save in known)
    ]


def fingerprint(base_model: Path) -> str:
    """Return what tells base models apart: the configuration, and names and heads of the weights."""
    digest = hashlib.sha256((base_model / "config.json").read_bytes())
    for path in weight_files(base_model):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()


def give_up_foreign_models(conn: Connection, fingerprint: str) -> int:
    """Mark models that were trained on another base model as lost. Returns how many."""
    before = server_state.get(conn, _TRAINED)
    server_state.put(conn, _TRAINED, fingerprint)
    if before in (None, fingerprint):
        return 0
    foreign = model_records.list_in_states(conn, ModelState.READY)
    for model in foreign:
        reason = why_lost(conn, model, "the server was started with another base model")
        model_records.set_state(conn, model.key, ModelState.LOST, reason)
        for future_id in queue.pending_of(conn, model.key):
            finish.fail(conn, future_id, Failure(reason, "server"))
    return len(foreign)


def why_lost(conn: Connection, model: ModelRow, cause: str) -> str:
    """Return why a model is lost, and which checkpoint to resume from."""
    last = checkpoint_records.latest_for_model(conn, model.key, CheckpointKind.WEIGHTS)
    advice = "it had no checkpoint: create the model again"
    if last is not None:
        advice = (
            f"its last checkpoint is {TinkerPath(model.model_id, last.kind, last.name)}: resume from there"
        )
    return f"the training state of model {model.model_id} is lost: {cause}; {advice}"
