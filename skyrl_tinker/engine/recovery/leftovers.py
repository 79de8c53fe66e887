"""Leftovers of a dead engine: directories that are incomplete, or that will never be recorded."""

import logging
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.futures import queue

_log = logging.getLogger(__name__)
_OF_SAVE = re.compile(r"[^.~][^~]*~(\d+)(?:\.\w+)?")
PARTIAL = (".*.partial", ".*.tmp")  # directories that were being written
OF_OTHERS = ("copy-*", "import-*")
"""Directories under the checkpoints that the API and `import-adapter` write, and then record."""
OF_OTHERS_PARTIAL = tuple(f".{pattern}" for pattern in OF_OTHERS)
"""Directories of these that are being written, or were when their writer died."""
UNRECORDED_S = 86400.0
"""Age in seconds from which one of these will not be recorded any more."""


def sweep_meetings(directory: Path) -> None:
    """Remove places at which ranks of an earlier engine met, before others meet there."""
    for path in directory.glob(".ranks-*"):
        shutil.rmtree(path, ignore_errors=True)


def sweep_partial(directories: Iterable[Path]) -> None:
    """Remove directories that an engine left incomplete."""
    for directory in directories:
        for path in (path for pattern in PARTIAL for path in directory.glob(pattern)):
            if not any(path.match(pattern) for pattern in OF_OTHERS_PARTIAL):
                shutil.rmtree(path, ignore_errors=True)


def sweep_unrecorded(root: Path, recorded: Iterable[str]) -> None:
    """Remove copies and imports without a checkpoint: their writer died, or their last one was deleted."""
    kept = {parent.name for directory in recorded for parent in Path(directory).parents}
    patterns = (*OF_OTHERS, *OF_OTHERS_PARTIAL)
    for path in (path for pattern in patterns for path in root.glob(pattern)):
        with suppress(FileNotFoundError):  # its writer publishes it just now
            if path.name not in kept and path.stat().st_mtime < time.time() - UNRECORDED_S:
                shutil.rmtree(path, ignore_errors=True)


def remove(directories: Iterable[Path]) -> None:
    for directory in directories:
        _log.info("%s goes: no checkpoint has it", directory)
        shutil.rmtree(directory, ignore_errors=True)


def list_saves(root: Path) -> dict[Path, tuple[ModelKey, int]]:
    """Return the directories of saves on this host, as `saves_of`."""
    return saves_of(root.glob("[0-9]*/*/*"))  # of models only: others come and go while an engine starts


def saves_of(directories: Iterable[Path]) -> dict[Path, tuple[ModelKey, int]]:
    """Return the directories of saves among these, each with its model and the future id of the save."""
    found: dict[Path, tuple[ModelKey, int]] = {}
    for path in directories:
        name, model = _OF_SAVE.fullmatch(path.name), path.parent.parent.name
        if name is not None and model.isdecimal():
            found[path] = ModelKey(int(model)), int(name[1])
    return found


def list_abandoned(conn: Connection, saves: Mapping[Path, tuple[ModelKey, int]]) -> list[Path]:
    """Return the directories that will never be recorded: their try of a save, or their removal, died.

    Directories of saves that are not in this database stay: it may be an older copy of the database that has
    them. Call it in a write, after the directories were listed: an engine replaced meanwhile is refused.
    """
    recorded = checkpoint_records.list_directories(conn).items()
    directories = {_name(Path(directory)): removed for directory, removed in recorded}
    known = queue.saves_among(conn, [number for _, number in saves.values()])
    return [
        path
        for path, save in saves.items()
        if (removed := directories.get(_name(path))) or (removed is None and save in known)
    ]


def _name(directory: Path) -> tuple[str, ...]:
    """Return the end of the path, as the root may have several names."""
    return directory.parts[-3:]
