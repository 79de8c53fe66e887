"""`skyrl-tinker logs`: the log files of a home, merged or one of them."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.errors import StartupError

POLL_S = 0.5


def log_files(settings: Settings, part: str | None) -> list[Path]:
    """Return the logs of a part, else all. Raises StartupError that names the parts there are."""
    files = sorted(Directories(settings).log_dir.glob("*.log"))
    if not files:
        raise StartupError(f"no logs below --home {settings.home}: no server has run there")
    chosen = [file for file in files if part in (None, file.stem)]
    if not chosen:
        parts = ", ".join(file.stem for file in files)
        raise StartupError(f"--part: found {part}, expected one of {parts}")
    return chosen


def last_lines(files: Sequence[Path], count: int) -> Iterator[str]:
    """Yield the last lines of each; with several files each line begins with the part."""
    for file in files:
        with file.open(errors="replace") as log:
            yield from (_line(file, files, line) for line in deque(log, count))


def follow(files: Sequence[Path]) -> Iterator[str]:
    """Yield lines as they are written, until the caller stops."""
    logs = {file: _at_end(file) for file in files}
    while True:
        found = [_line(file, files, line) for file, log in logs.items() for line in log]
        yield from found
        if not found:
            time.sleep(POLL_S)
            for file, log in logs.items():
                if file.stat().st_size < log.tell():  # it was rotated
                    log.seek(0)


def _at_end(file: Path) -> IO[str]:
    log = file.open(errors="replace")
    log.seek(0, 2)
    return log


def _line(file: Path, files: Sequence[Path], line: str) -> str:
    text = line.rstrip("\n")
    return text if len(files) == 1 else f"{file.stem}: {text}"
