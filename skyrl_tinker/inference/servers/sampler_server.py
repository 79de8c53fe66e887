"""One sampling server process and the Ray actor that owns it: the process dies with its actor."""

import os
import re
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import ray

from skyrl_tinker.errors import MOST_CHARACTERS
from skyrl_tinker.inference.constants import NICENESS, SLICE_S
from skyrl_tinker.inference.servers.ports import reserve_port
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.system.interfaces import interface_of
from skyrl_tinker.system.processes import compute_in_slices, die_with_parent

STOP_GRACE_S = 5.0
TAIL_BYTES = 4000
SEARCHED_BYTES = 64 * TAIL_BYTES
_SAID_ABOVE = re.compile("root cause|from a child process")
"""Words of an engine's first process about an error that another of its processes has logged."""
_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)")


@dataclass(frozen=True, slots=True)
class ServerStatus:
    url: str
    pid: int
    exit_code: int | None  # None while it runs


class SamplerServer:
    """Ray actor; its methods do not wait, the group does.

    Methods run on the actor's main thread, which lives as long as the actor: the kernel ends the server with
    the thread that started it.
    """

    def __init__(self, spec: SamplerSpec, replica: int) -> None:
        self._spec = spec
        self._replica = replica
        name = spec.engine.title.lower()
        self._log = Path(spec.log_dir) / f"{name}{spec.log_suffix}-{replica}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port_guard: socket.socket | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix=f"{name}-")  # for sockets, which it leaves
        self._url = ""
        self._log_start = 0

    def start(self) -> ServerStatus:
        """Start the process; it is ready when GET <url>/health answers 200.

        Raises SamplerError if it does not fit this host's memory.
        """
        engine = self._spec.engine
        engine.require_memory(self._spec)
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._port_guard = reserve_port(address)
        port = self._port_guard.getsockname()[1]
        self._url = f"http://{address}:{port}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                engine.command(self._spec, port, address),
                env=engine.environment(self._spec, self._replica, interface_of(address))
                | {"TMPDIR": self._scratch.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, SLICE_S[self._spec.device]),
            )
        return self.status()

    def status(self) -> ServerStatus:
        process = self._started()
        return ServerStatus(self._url, process.pid, process.poll())

    def log_tail(self) -> str:
        """Return the end of this process's log, and last the error above it that it refers to."""
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            start = self._log_start if self._log_start <= size else 0  # 0: the log was truncated meanwhile
            log.seek(max(start, size - SEARCHED_BYTES))
            return with_cause(log.read().decode(errors="replace"))

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL to the whole process group."""
        process = self._started()
        leftovers = _shared_memory(process.pid, self._spec.engine.leftovers)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):  # killed with its children below
            process.wait(STOP_GRACE_S)
        self._kill(leftovers)

    def kill(self) -> None:
        """Send SIGKILL to the whole process group; harmless if it has ended."""
        self._kill(_shared_memory(self._started().pid, self._spec.engine.leftovers))

    def _kill(self, leftovers: set[Path]) -> None:
        process = self._started()
        with suppress(ProcessLookupError):  # it is gone
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for file in leftovers:
            file.unlink(missing_ok=True)
        if self._port_guard is not None:
            self._port_guard.close()
        self._scratch.cleanup()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("start() comes first")
        return self._process


def with_cause(log: str) -> str:
    """Return the end of a log; if it refers to an error above, with that error as its last line."""
    tail = log[-TAIL_BYTES:]
    if _SAID_ABOVE.search(tail):
        lines = (line for line in reversed(log.splitlines()) if not _SAID_ABOVE.search(line))
        if said := next(filter(None, map(_ERROR.search, lines)), None):
            return f"{tail.rstrip()}\n{said[1][:MOST_CHARACTERS]}\n"
    return tail


def _shared_memory(pid: int, leftovers: tuple[str, ...]) -> set[Path]:
    """List the shared-memory files of a process's descendants, which they leave when killed."""
    files = set()
    with suppress(psutil.NoSuchProcess):  # gone already
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(OSError):  # it ended just now
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    name = line.rpartition(" ")[2]
                    if name.startswith(leftovers):
                        files.add(Path(name))
    return files


def _die_with_parent(slice_s: float) -> None:
    if slice_s and not compute_in_slices(slice_s):
        os.nice(NICENESS)
    die_with_parent(signal.SIGKILL)
