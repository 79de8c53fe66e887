"""Mark of the database that a place of checkpoints or snapshots belongs to: a file in the place itself."""

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from skyrl_tinker.errors import StorageError
from skyrl_tinker.system.atomic_directory import fsync, storage_errors

FILE_NAME = ".database"


class MarkedPlace(Protocol):
    """Place with a mark, which is written once. Both raise StorageError."""

    def read_mark(self) -> str | None: ...
    def write_mark(self, mark: str) -> None: ...


class LocalPlace:
    def __init__(self, root: Path) -> None:
        self._file = root / FILE_NAME

    def read_mark(self) -> str | None:
        """Return the mark. None: no file, or the empty one of a server that died before it wrote."""
        with storage_errors(f"cannot read {self._file}"):
            return self._file.read_text().strip() or None if self._file.exists() else None

    def write_mark(self, mark: str) -> None:
        """Write the mark unless there is one. Of two servers at once the second waits for the first."""
        with storage_errors(f"cannot write {self._file}"):
            with self._file.open("a") as file:
                _lock(file)
                if self.read_mark() is None:
                    file.write(mark)
            fsync(self._file)
            fsync(self._file.parent)


def _lock(file: IO[str]) -> None:
    """Lock it until it is closed, however the process ends, where the file system knows locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


def claim(place: MarkedPlace, owner: str, lacks_files: Callable[[], bool]) -> None:
    """Mark a place as the database's `owner`. `lacks_files`: asked where there is no mark.

    Raises StorageError where the mark is another's, and where files are lacking, as of a disk not mounted.
    """
    if place.read_mark() is None:
        if lacks_files():
            raise StorageError(
                f"found none of the files that the database has recorded there, and no {FILE_NAME}; expected "
                "both: mount the place, or bring the files back. To start without them, write the line "
                f"{owner} to {FILE_NAME} there"
            )
        place.write_mark(owner)
    if place.read_mark() != owner:  # also of one that marked it since
        raise StorageError(
            f"found the files of another database, expected a place of its own; delete {FILE_NAME} there if "
            "that database is gone"
        )
