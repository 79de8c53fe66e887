"""The API as a process of its own."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx

from skyrl_tinker.config import Settings


@dataclass(frozen=True)
class Api:
    url: str
    process: subprocess.Popen[bytes]
    settings: Settings

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/healthz", verify=False).raise_for_status()
                return
            except httpx.TransportError:
                assert self.process.poll() is None
                time.sleep(0.05)
        raise AssertionError("the API did not come up")

    def stop(self) -> float:
        """SIGTERM; seconds until it was gone."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=30) == 0
        return time.monotonic() - began


@contextmanager
def launched(settings: Settings, listener: socket.socket, log: Path | None = None) -> Iterator[Api]:
    """Without a ready engine and, until a test writes them, without facts. The home exists.

    `log`: a file for what it prints, by default our own stderr.
    """
    file = settings.root / "settings.json"
    file.write_text(settings.model_dump_json())
    fd = listener.fileno()
    command = [sys.executable, "-m", "skyrl_tinker.api.api_process", str(file), str(fd)]
    with nullcontext() if log is None else log.open("ab") as output:
        process = subprocess.Popen(command, pass_fds=[fd], stderr=output)
    listener.close()  # or connections would wait for ever once the API has ended
    try:
        scheme = "https" if settings.tls_cert else "http"
        yield Api(f"{scheme}://127.0.0.1:{settings.port}", process, settings)
    finally:
        process.kill()
        process.wait()
