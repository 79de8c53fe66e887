"""Copies of weight versions in this host's memory, made once for all samplers of the host."""

import fcntl
import hashlib
import json
import os
import shutil
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import quote

from skyrl_tinker.system.atomic_directory import atomic_directory
from skyrl_tinker.system.user_directory import make_private, user_directory

TIMEOUT_S = 60.0
"""Limit for each answer, and each part of one."""
_SHM = Path("/dev/shm")
_BLOCK_BYTES = 4 << 20
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # private addresses need no proxy


class VersionCopies:
    """Copies that this process holds; a copy that no process of the host holds is deleted.

    A lock file stands beside each, shared by those that hold the copy. Who deletes it has the lock alone. The
    kernel unlocks it when a process dies.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Use `root`, by default one directory for all of this user's processes on this host."""
        self._root = root or user_directory(_SHM, Path("copies"))
        for directory in (self._root.parent, self._root):
            make_private(directory)
        self._held: dict[str, IO[bytes]] = {}
        for lock in self._root.glob("*.lock"):  # of processes that were killed
            _delete_unless_held(lock.with_suffix(""))

    def hold(self, url: str) -> Path:
        """Return the copy of the version at a VersionServer's `url`, made if missing; until `release`.

        Raises OSError when it cannot be had.
        """
        copy = self._path(url)
        if url not in self._held:
            lock = _shared_lock(copy)
            try:
                _make(copy, url)
            except BaseException:  # cancelled or failed: a partial copy is nobody's
                lock.close()
                _delete_unless_held(copy)
                raise
            self._held[url] = lock
        return copy

    def release(self, url: str) -> None:
        """Give up a copy; harmless if it is not held."""
        lock = self._held.pop(url, None)
        if lock is not None:
            lock.close()
            _delete_unless_held(self._path(url))

    def _path(self, url: str) -> Path:
        name = url.rpartition("/")[2]
        return self._root / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _shared_lock(copy: Path) -> IO[bytes]:
    """Take a shared lock on a copy, which need not exist yet."""
    path = _lock_of(copy)
    while True:
        lock = path.open("ab")
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_same(lock, path):
            return lock
        lock.close()  # who deleted the copy removed the file, too


def _make(copy: Path, url: str) -> None:
    """Make a copy that is locked, unless it is there; one process at a time."""
    with copy.with_name(f"{copy.name}.making").open("ab") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        if not copy.exists():
            _pull(url, copy)


def _delete_unless_held(copy: Path) -> None:
    with suppress(FileNotFoundError, BlockingIOError), _lock_of(copy).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy, ignore_errors=True)
        copy.with_name(f"{copy.name}.making").unlink(missing_ok=True)
        _lock_of(copy).unlink(missing_ok=True)


def _lock_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.lock")


def _is_same(lock: IO[bytes], path: Path) -> bool:
    """Return whether an open lock file is still the one at its path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    return False


def _pull(url: str, target: Path) -> None:
    """Copy a version's files; raises OSError, and then there are none."""
    with atomic_directory(target) as staging:
        with _OPENER.open(url, timeout=TIMEOUT_S) as answer:
            files: dict[str, int] = json.load(answer)
        for name, size in files.items():
            _pull_file(f"{url}?file={quote(name)}", staging / name, size)


def _pull_file(url: str, path: Path, size: int) -> None:
    with _OPENER.open(url, timeout=TIMEOUT_S) as answer, path.open("wb") as file:
        shutil.copyfileobj(answer, file, _BLOCK_BYTES)
    if path.stat().st_size != size:
        raise OSError(f"{path.name} ended after {path.stat().st_size} of {size} bytes")
