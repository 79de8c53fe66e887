"""Child process of a server, with its log."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_tinker import errors
from skyrl_tinker.directories import Directories
from skyrl_tinker.system import processes

MOST_DEATHS, DEATHS_WITHIN_S = 5, 120.0


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


@dataclass(slots=True, eq=False)
class ChildProcess:
    """A child process in its own session, so that Ctrl-C in a terminal reaches only `serve`.

    Its temporary files lie beside the sockets and are deleted with them: a killed sampler leaves some behind.
    """

    name: str
    module: str
    directories: Directories
    listener: socket.socket | None = (
        None  # inherited; its file descriptor and the name are the last arguments
    )
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    process: asyncio.subprocess.Process | None = None
    retired: bool = False
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_DEATHS))

    @property
    def log(self) -> Path:
        return self.directories.log_dir / f"{self.name}.log"

    async def run(self) -> int:
        """Start it and wait until it ends. Returns the exit code, negative for a signal."""
        inherited = () if self.listener is None else (self.listener.fileno(),)
        named = () if self.listener is None else (self.name,)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self.module),
                *(str(self.directories.settings_file), *self.arguments, *map(str, inherited), *named),
                pass_fds=inherited,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
                env={
                    **os.environ,
                    **self.environment,
                    "PYTHONUNBUFFERED": "1",
                    "TMPDIR": str(self.directories.bell_dir),
                },
            )
        if self.retired:  # while it was started
            self.retire()
        return await self.process.wait()

    @property
    def pid(self) -> int | None:
        """Process id, None unless it runs."""
        return self.process.pid if self.process and self.process.returncode is None else None

    def retire(self) -> None:
        """Tell it to end once its open requests are answered."""
        self.retired = True
        if self.process is not None and self.pid is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR2)

    def dies_too_often(self, code: int) -> bool:
        """Count one death; return whether there were too many in a short time.

        For want of time (EX_TEMPFAIL) it may die as often as it likes: the machine is busy.
        """
        if code == os.EX_TEMPFAIL:
            return False
        self.deaths.append(time.monotonic())
        return len(self.deaths) == MOST_DEATHS and self.deaths[-1] - self.deaths[0] < DEATHS_WITHIN_S
