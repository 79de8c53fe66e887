"""Files of checkpoints on the host of one rank, which may not share the engine's directories."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from skyrl_tinker.system.user_directory import make_private, user_directory
from skyrl_tinker.training.checkpoints import checkpoint_load


class HostFiles:
    """Files by their paths on the engine's host; those of unshared directories are in a scratch directory.

    `memory_root`, in each host's memory, has the same path on all hosts. Methods may be called in any thread.
    """

    def __init__(self, memory_root: str) -> None:
        self._memory_root = memory_root
        self._scratch = user_directory(Path(tempfile.gettempdir()), Path(memory_root)) / "carried"
        self._unshared: list[str] = []

    def look_for(self, marks: Mapping[str, str]) -> list[str]:
        """Record and return the directories that this host does not share.

        `marks`: for each directory, the name of a file that the engine has created there.
        """
        self._unshared = [root for root, name in marks.items() if not os.path.exists(f"{root}/{name}")]
        return self._unshared

    def drop_leftovers(self) -> None:
        """Remove the files of dead ranks. Only for hosts other than the engine's."""
        for directory in (self._memory_root, self._scratch):
            shutil.rmtree(directory, ignore_errors=True)

    def here(self, path: str) -> Path:
        """Return the path of a file or directory on this host.

        Raises StartupError if another user owns our path in the directory for temporary files.
        """
        if not any(Path(path).is_relative_to(root) for root in self._unshared):
            return Path(path)
        for directory in (self._scratch.parent.parent, self._scratch.parent):  # which the system may remove
            make_private(directory)
        return self._scratch / Path(path).relative_to("/")

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the bytes of the files in a directory, by name."""
        return {file.name: file.stat().st_size for file in self.here(directory).iterdir()}

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return at most `size` bytes of a file."""
        with self.here(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, path: str, offset: int, content: bytes) -> None:
        """Write a part of a file; the part at offset 0 creates it."""
        file = self.here(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("r+b" if offset else "wb") as opened:
            opened.seek(offset)
            opened.write(content)

    def verify(self, checkpoint: str, rank: int, ranks: int) -> None:
        """Check a rank's share of a checkpoint's files, as checkpoint_load.verify does."""
        checkpoint_load.verify(self.here(checkpoint), rank, ranks)

    def remove(self, directory: str) -> None:
        """Remove a directory; harmless if there is none."""
        shutil.rmtree(self.here(directory), ignore_errors=True)
