"""A server in the background of another program for the length of a `with` block."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_tinker.errors import StartupError
from skyrl_tinker.server.announcement import READY
from skyrl_tinker.system import processes

_STOP_S = 20.0


@contextmanager
def background_server(home: Path, *options: str) -> Iterator[str]:
    """Run `skyrl-tinker serve --home HOME --port 0 OPTIONS…` and yield its URL once it is ready.

    It ends with the block, or with this process. Raises StartupError when it does not become ready; stderr
    then says why.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "skyrl_tinker",
            "serve",
            "--home",
            str(home),
            "--port",
            "0",
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=processes.die_with_parent,
    )
    try:
        yield _wait_for_url(process)
    finally:
        _stop(process)


def _wait_for_url(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise StartupError(f"the server ended while starting (exit code {process.wait()})")


def _stop(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
