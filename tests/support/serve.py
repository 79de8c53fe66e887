"""A server as a user starts it, with an eye on every process that it has."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.support.processes import below, command, is_zombie, title, vllm_servers
from tests.support.waiting import wait_until

STOP_S, HEAL_S, START_S, READY_S = 30, 180, 120, 300  # on a machine that is busy with other tests
LAST_LINES = 30
KINDS = {  # part of the title
    "API": "skyrl_tinker.api.api_process",
    "engine": "skyrl_tinker.engine.engine_process",
    "trainer": "ray::RankProcess",
    "raylet": "raylet/raylet",
    "GCS": "gcs/gcs_server",
    "vLLM server": "vllm.vllm_entry",
    "router": "vllm::router",
}
CORE = "vLLM engine core"
"""Child of vLLM's server. Now and then without its title: setproctitle gives none where the first variable of
the environment was changed, and Ray's workers have the variables in random order."""


class Serve:
    """`skyrl-tinker serve` with its own home on a free port, and every process that it was seen to have."""

    def __init__(self, home: Path, *options: str, python: str = sys.executable) -> None:
        self.home = home
        command = [python, "-m", "skyrl_tinker", "serve", "--home", str(home), "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=home.parent,
        )
        self.seen: set[psutil.Process] = set()
        self.url = ""

    def wait_ready(self, within_s: float = READY_S) -> "Serve":
        """Raises TimeoutError, which says how far it is."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], within_s)[0]:
            raise TimeoutError(f"not ready within {within_s:.0f} s, {self._how_far()}")
        line = self.process.stdout.readline()
        assert re.match("skyrl-tinker ready: https?://127.0.0.1:", line), self.process.communicate()
        self.url = line.split()[-1]
        self.tree()
        return self

    def _how_far(self) -> str:
        log = self.home / "logs" / "engine.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else ["has no log"]
        return "\n".join((f"at a load of {os.getloadavg()[0]:.1f}; the engine:", *lines[-LAST_LINES:]))

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        found = [root, *root.children(recursive=True)]
        self.seen.update(found)
        return found

    def find(self, kind: str) -> psutil.Process | None:
        return next(iter(self.find_all(kind)), None)

    def find_all(self, kind: str) -> list[psutil.Process]:
        if kind == CORE:
            found = [each for server in vllm_servers(self.process.pid) for each in below(server.pid)]
            return [each for each in found if "resource_tracker" not in title(each)]
        return [each for each in self.tree() if KINDS[kind] in title(each)]

    def unreaped(self) -> list[psutil.Process]:
        """Dead processes whose parents have not asked how they ended."""
        return [each for each in self.tree() if is_zombie(each)]

    def ready(self) -> bool:
        try:
            # Without `verify=False` each call loads all root certificates, in 25 ms.
            return httpx.get(f"{self.url}/readyz", timeout=5, verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def left(self) -> list[str]:
        self.process.poll()  # or it stays a zombie
        return [f"{each.pid} {' '.join(command(each))}" for each in self.seen if each.is_running()]

    def stop(self) -> None:
        self.tree()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_S) == 0
        assert not self.left()

    def close(self) -> None:
        """Whatever a failed test left."""
        if self.process.poll() is None:
            self.process.kill()
        wait_until(lambda: not self.left(), STOP_S)
        self.process.communicate()


@contextmanager
def serving(
    home: Path, *options: str, settings: str = "", python: str = sys.executable, within_s: float = READY_S
) -> Iterator[Serve]:
    """Ready; ended in good order, unless something failed. `settings`: a file of them, beside the home."""
    if settings:
        (file := home.parent / "settings.toml").write_text(settings)
        options = (*options, "--config", str(file))
    served = Serve(home, *options, python=python)
    try:
        yield served.wait_ready(within_s)
        served.stop()
    finally:
        served.close()
