"""A server of one's own for a benchmark: started in a temporary home, ended with it."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

READY = "skyrl-tinker ready: "


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, int]]:
    """URL and pid of `skyrl-tinker serve`, ready."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "skyrl_tinker", "serve", "--home", home, "--port", "0"]
        server = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            line = next((line for line in server.stdout if line.startswith(READY)), None)
            if line is None:
                raise SystemExit(f"serve ended with {server.wait()}")
            yield line.removeprefix(READY).strip(), server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
