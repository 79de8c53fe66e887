"""Lock by which one process at a time does a job; the kernel releases it however the process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from skyrl_tinker.errors import StartupError


def holder(file: Path) -> int | None:
    """Return the process that holds the lock, None without one; nobody is kept from taking it meanwhile."""
    try:
        pid = int(file.read_text())
        opened = [each.path for each in psutil.Process(pid).open_files()]
    except (FileNotFoundError, ValueError, psutil.Error):
        return None
    return pid if any(map(file.samefile, filter(os.path.exists, opened))) else None


@contextmanager
def process_lock(file: Path, job: str) -> Iterator[None]:
    """Hold the lock. Raises StartupError, naming `job` and the process that does it, if it is taken."""
    with file.open("a+") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(
                f"another {job} (pid {file.read_text() or '?'}) runs with --home {file.parents[1]}; "
                "stop it or choose another home"
            ) from None
        opened.truncate(0)
        opened.write(str(os.getpid()))
        opened.flush()
        yield
