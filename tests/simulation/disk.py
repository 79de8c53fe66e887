"""The disk of a simulated machine: what was written and not synced is gone after a power cut."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32


class Disk:
    """What would outlive a power cut: contents of files and names in directories, as they were when synced.

    With a directory its own name is synced, and those of all around it, as file systems with a journal do.
    """

    def __init__(self) -> None:
        self._contents: set[tuple[int, int]] = set()  # inodes with checksums
        self._names: dict[int, dict[str, int]] = {}  # by directory: inodes by name

    def sync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not os.path.isdir(path):
            self._contents.add(_content(path))
            return
        inode = _inode(path)
        with os.scandir(path) as entries:
            self._names[inode] = {each.name: each.stat().st_ino for each in entries}
        while path != "/":
            path, name = os.path.split(path)
            around = _inode(path)
            self._names.setdefault(around, {})[name] = inode
            inode = around

    def cut_power(self, directories: Iterable[Path]) -> None:
        """Lose what is below them and was not synced; a name that was changed is the earlier one again."""
        for directory in directories:
            synced = self._names.get(_inode(directory), {})
            earlier = {inode: name for name, inode in synced.items()}
            for path in list(directory.iterdir()):
                if path.name not in synced and _inode(path) in earlier:
                    path = path.rename(directory / earlier[_inode(path)])
                if path.name not in synced:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                elif path.is_dir():
                    self.cut_power([path])
                elif _content(path) not in self._contents:
                    path.write_bytes(b"")


def _inode(path: str | Path) -> int:
    return os.stat(path).st_ino


def _content(path: str | Path) -> tuple[int, int]:
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_ino, crc32(file.read())
