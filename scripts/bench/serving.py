"""A server of one's own for a benchmark: started in a temporary home, ended with it."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY = "skyrl-tinker ready: "


@contextmanager
def served(*arguments: str, checkout: Path | None = None) -> Iterator[tuple[str, int]]:
    """URL and pid of `skyrl-tinker serve`, ready. `checkout`: with a .venv, served in place of ours."""
    programs = Path(sys.executable).parent if checkout is None else checkout.absolute() / ".venv" / "bin"
    with tempfile.TemporaryDirectory() as home:
        command = [str(programs / "skyrl-tinker"), "serve", "--home", home, "--port", "0"]
        server = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, cwd=checkout)
        assert server.stdout is not None
        try:
            line = next((line for line in server.stdout if line.startswith(READY)), None)
            if line is None:
                raise SystemExit(f"serve ended with {server.wait()}")
            yield line.removeprefix(READY).strip(), server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
