"""Directories of one user in places that others can write to, such as /tmp and /dev/shm."""

import hashlib
import os
from pathlib import Path

from skyrl_tinker.errors import StartupError


def user_directory(shared: Path, home: Path) -> Path:
    """Return the directory of this home in `shared`: short, since a socket's path has at most 107 bytes."""
    digest = hashlib.sha256(str(home.absolute()).encode()).hexdigest()
    return shared / f"skyrl-tinker-{os.getuid()}" / digest[:10]


def make_private(directory: Path) -> None:
    """Create a directory for this user only. Raises StartupError for another user's directory, or a link."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or directory.is_symlink():
        raise StartupError(f"{directory} belongs to another user; remove it and start again")
    directory.chmod(0o700)
