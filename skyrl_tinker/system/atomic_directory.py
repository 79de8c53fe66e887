"""Directories and files that appear complete or not at all, also after a power cut."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_tinker.errors import DiskFullError, StorageError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; publish it as `directory`, or remove it when the block fails."""
    staging = make_staging(directory)
    try:
        yield staging
        publish(staging, directory)
    except BaseException:  # cancelled or failed: its files must not stay on the disk
        shutil.rmtree(staging, ignore_errors=True)
        raise


def staging_of(directory: Path) -> Path:
    """Return the hidden sibling that becomes `directory`; the engine sweeps leftovers when it starts."""
    return directory.with_name(f".{directory.name}.partial")


def make_staging(directory: Path) -> Path:
    """Create the hidden sibling of `directory`, empty. Raises OSError."""
    staging = staging_of(directory)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish(staging: Path, directory: Path) -> int:
    """Make all of `staging` durable, then rename it to `directory`; returns the size in bytes.

    Raises OSError, also when `directory` exists and is not empty. If it exists then, it is complete, but its
    name may not outlive a power cut.
    """
    for path in (*staging.rglob("*"), staging):
        fsync(path)
    staging.rename(directory)
    return make_durable(directory)


def make_durable(directory: Path) -> int:
    """Make the name of a published directory durable; returns its size in bytes. Raises OSError."""
    fsync(directory.parent)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def write_file(path: Path, text: str) -> None:
    """Replace a small file. Raises OSError."""
    staging = path.with_name(f".{path.name}.tmp")
    staging.write_text(text)
    fsync(staging)
    staging.rename(path)
    fsync(path.parent)


def link(source: str | Path, target: str | Path) -> None:
    """Link a file that is never written again, or copy it. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:  # as between file systems
        shutil.copy2(source, target)


@contextmanager
def storage_errors(message: str) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError, DiskFullError: `message`, and the system's reason."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno in _FULL else StorageError
        raise kind(f"{message}: {error.strerror or error}") from error


def fsync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
