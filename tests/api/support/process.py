"""The API as a process of its own."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from skyrl_tinker.config import Settings


@dataclass(frozen=True)
class Api:
    url: str
    process: subprocess.Popen[bytes]
    settings: Settings

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/healthz").raise_for_status()
                return
            except httpx.TransportError:
                assert self.process.poll() is None
                time.sleep(0.05)
        raise AssertionError("the API did not come up")

    def stop(self) -> float:
        """SIGTERM; seconds until it was gone."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=10) == 0
        return time.monotonic() - began


@contextmanager
def launched(settings: Settings, listener: socket.socket) -> Iterator[Api]:
    """Without a ready engine and, until a test writes them, without facts. The home exists."""
    file = settings.root / "settings.json"
    file.write_text(settings.model_dump_json())
    fd = listener.fileno()
    command = [sys.executable, "-m", "skyrl_tinker.api.api_process", str(file), str(fd)]
    process = subprocess.Popen(command, pass_fds=[fd])
    listener.close()  # or connections would wait for ever once the API has ended
    try:
        yield Api(f"http://127.0.0.1:{settings.port}", process, settings)
    finally:
        process.kill()
        process.wait()
