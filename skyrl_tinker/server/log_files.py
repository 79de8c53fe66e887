"""Log files of a server's processes, bounded: one that has grown too large is copied and emptied.

All who write to a log have opened it to append, and go on doing so: no pipe between them and the file can
break or stall them. A line that is written in the moment between copy and truncation is lost or cut.
"""

import os
import shutil
from pathlib import Path

from skyrl_tinker import errors

_TAIL_BYTES = 65536


def rotate(directory: Path, limit: int) -> None:
    """Copy each log above `limit` bytes to .1, the one before to .2, and empty it.

    Raises OSError, as on a full disk: then it is as large as it was.
    """
    for log in directory.glob("*.log"):
        if log.stat().st_size > limit:
            _rotate(log)


def _rotate(log: Path) -> None:
    newer, older = (log.with_name(f"{log.name}.{number}") for number in (1, 2))
    if newer.exists():
        newer.replace(older)
    shutil.copyfile(log, newer)
    os.truncate(log, 0)


def last_line(log: Path) -> str:
    """Return the last line that tells something, "none" if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return errors.last_line(file.read().decode(errors="replace"))
