"""Spill of ephemeral weights from memory (tmpfs) to disk: the oldest move when memory runs low.

A version keeps its directory. Its files become links, each in one step, so that a sampler that reads them
again at any moment finds them.
"""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from skyrl_tinker.domain.values import WeightVersion

SPARE = 0.5  # of the tmpfs stays free: what lies in it is memory that processes lack


class TmpfsSpill:
    """All methods block: call them in a thread, one at a time."""

    def __init__(self, memory: Path, disk: Path, spare: float = SPARE) -> None:
        self._memory = memory
        self._disk = disk
        self._spare = spare

    def low(self) -> bool:
        usage = shutil.disk_usage(self._memory)
        return usage.free < self._spare * usage.total and self._would_help()

    def move(self, version: WeightVersion) -> None:
        """Move it to disk, if it is not there already. OSError: the disk is full, and nothing has changed."""
        _move(Path(version.directory), self._disk / version.name)

    def remove(self, version: WeightVersion) -> None:
        for directory in (Path(version.directory), self._disk / version.name):
            shutil.rmtree(directory, ignore_errors=True)

    def sweep(self, known: Collection[str]) -> None:
        """Remove what an engine left that died between writing a version and recording it, or removing it."""
        for root in (self._memory, self._disk):
            for path in root.glob("v*"):
                if path.name not in known:
                    shutil.rmtree(path, ignore_errors=True)

    def _would_help(self) -> bool:
        """Return False where the weights lie on a disk anyway."""
        self._disk.mkdir(parents=True, exist_ok=True)
        return os.stat(self._memory).st_dev != os.stat(self._disk).st_dev


def _move(directory: Path, target: Path) -> None:
    files = [file for file in directory.iterdir() if not file.is_symlink()]
    if not files:
        return  # moved already
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        _move_file(file, target / file.name)


def _move_file(file: Path, target: Path) -> None:
    try:
        shutil.copyfile(file, target)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    link = file.with_name(f".{file.name}.link")
    link.unlink(missing_ok=True)
    link.symlink_to(target.absolute())
    link.replace(file)
