"""Directories of one user: in places that others can write to, such as /tmp and /dev/shm, and elsewhere.

Sockets lie in /tmp and not in XDG_RUNTIME_DIR, which systemd deletes when its user has logged out: a server
started with nohup would lose them. The name that we want there may be taken by another user: then we take
the next one.
"""

import hashlib
import itertools
import os
import stat
from pathlib import Path

from skyrl_tinker.errors import StartupError


def user_directory(shared: Path, home: Path) -> Path:
    """Return the directory of this home in `shared`: short, since a socket's path has at most 107 bytes."""
    digest = hashlib.sha256(str(home.absolute()).encode()).hexdigest()
    return _user_root(shared) / digest[:10]


def make_private(directory: Path) -> None:
    """Create a directory for this user only. Raises StartupError for another user's directory, or a link."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(directory):
        raise StartupError(f"{directory} belongs to another user; remove it and start again")
    directory.chmod(0o700)


def close_to_others(directory: Path) -> None:
    """Take a directory's permissions from other users, if it is ours and not one for all, such as /tmp."""
    status = directory.stat()
    if status.st_uid == os.getuid() and not status.st_mode & stat.S_ISVTX:
        directory.chmod(stat.S_IMODE(status.st_mode) & 0o700)


def _user_root(shared: Path) -> Path:
    """Return this user's directory in `shared`, by the same name in all processes, or the first free name."""
    first = f"skyrl-tinker-{os.getuid()}"
    taken = {name for name in os.listdir(shared) if name.startswith(first)}
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(1)))
    candidates = list(itertools.islice(names, len(taken) + 1))
    ours = (name for name in candidates if name in taken and _is_ours(shared / name))
    return shared / next(ours, next(name for name in candidates if name not in taken))


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
