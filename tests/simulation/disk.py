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
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_dir():
            self._contents.add(_content(path))
            return
        self._names[_inode(path)] = {each.name: _inode(each) for each in path.iterdir()}
        for each in path.parents:
            self._names.setdefault(_inode(each), {})[path.name] = _inode(path)
            path = each

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


def _inode(path: Path) -> int:
    return path.stat().st_ino


def _content(path: Path) -> tuple[int, int]:
    return _inode(path), crc32(path.read_bytes())
