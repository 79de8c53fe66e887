"""Spill of ephemeral weights from memory (tmpfs) to disk: the oldest move when memory runs low.

A version keeps its directory. Its files become links, each atomically, so that a sampler can read them at any
moment. A copy on disk is complete or absent, and survives a reboot.
"""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from skyrl_tinker.domain.manifest import write_listing
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.outbox import when_possible
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.system.atomic_directory import atomic_directory, storage_errors
from skyrl_tinker.system.off_loop import in_disk_thread

SPARE = 0.5  # of the tmpfs stays free: its files take memory from processes


class TmpfsSpill:
    """All methods but `restore` block: call them in a thread, one at a time for each version."""

    def __init__(
        self, memory: Path, disk: Path, storage: Storage = LOCAL_DISK, *, spare: float = SPARE
    ) -> None:
        """`storage`: for copies of the versions kept on disk, for a host that takes over."""
        self._memory = memory
        self._disk = disk
        self._storage = storage
        self._spare = spare

    def low(self) -> bool:
        usage = shutil.disk_usage(self._memory)
        return usage.free < self._spare * usage.total and self._would_help()

    def keep(self, version: WeightVersion) -> None:
        """Copy it to disk, if it is only in memory, and to storage.

        Raises OSError if the disk is full, and StorageError.
        """
        copy = self._disk / version.name
        stored = self._storage.has(copy)
        if self._would_help() or not stored:
            self._copy(version)
        if copy.exists() and not stored:
            write_listing(copy)
            self._storage.store(copy)

    def move(self, version: WeightVersion) -> bool:
        """Move it to disk, if it is in memory; return whether it is on disk.

        Raises OSError if the disk is full; nothing has changed then.
        """
        if not Path(version.directory).exists():  # as after a reboot
            return False
        self._copy(version)
        for file in Path(version.directory).iterdir():
            if not file.is_symlink():
                _replace_by_link(file, self._disk / version.name / file.name)
        return True

    async def restore(self, version: WeightVersion) -> None:
        """Restore its directory, after a reboot or on another host, if it was kept. Raises StorageError."""
        await when_possible(self._storage.fetch_off_loop, self._disk / version.name)
        await in_disk_thread(self._link, version)

    def _link(self, version: WeightVersion) -> None:
        directory, kept = Path(version.directory), self._disk / version.name
        with storage_errors(f"{kept} could not be linked to"):
            if not directory.exists() and kept.exists():
                with atomic_directory(directory) as staging:
                    for file in kept.iterdir():
                        (staging / file.name).symlink_to(file.absolute())

    def remove(self, version: WeightVersion) -> None:
        copy = self._disk / version.name
        self._storage.discard(copy)  # another host may have stored it
        for directory in (Path(version.directory), copy):
            shutil.rmtree(directory, ignore_errors=True)

    def sweep(self, known: Collection[str]) -> None:
        """Remove versions of an engine that died after writing them but before recording or removing them."""
        for root in (self._memory, self._disk):
            for path in root.glob("v*"):
                if path.name not in known:
                    shutil.rmtree(path, ignore_errors=True)
        for path in self._storage.listed("v[0-9]*"):
            if path.name not in known:
                self._storage.discard(path)

    def _copy(self, version: WeightVersion) -> None:
        source, target = Path(version.directory), self._disk / version.name
        if source.exists() and not target.exists():
            with atomic_directory(target) as staging:
                for file in source.iterdir():
                    shutil.copyfile(file, staging / file.name)

    def _would_help(self) -> bool:
        """Return False if the weights are on a disk anyway."""
        self._disk.mkdir(parents=True, exist_ok=True)
        return os.stat(self._memory).st_dev != os.stat(self._disk).st_dev


def _replace_by_link(file: Path, target: Path) -> None:
    link = file.with_name(f".{file.name}.link")
    link.unlink(missing_ok=True)
    link.symlink_to(target.absolute())
    link.replace(file)
