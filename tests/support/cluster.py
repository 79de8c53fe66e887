"""A Ray cluster on hosts of this machine, and a server on the first of them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.hosts import Host
from tests.support.serve import START_S
from tests.support.waiting import wait_until

GCS_PORT, API_PORT = 6379, 8000  # free on hosts of our own
_BIN = Path(sys.executable).parent
_ROOT = Path(__file__).parents[2]
_OBJECT_STORE_BYTES = 100 << 20


def ray_environment() -> dict[str, str]:
    """Return what all processes of a cluster share: its token, and how little it starts."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "c1" * 32,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_enable_metrics_collection": "0",
        "PYTHONPATH": str(_ROOT),
    }


def start_ray(host: Host, head: Host, *, cpus: int) -> None:
    """Make the host a node of the cluster; `cpus` ranks have room on it."""
    joined = (f"--address={head.address}:{GCS_PORT}",)
    role = ("--head", f"--port={GCS_PORT}", "--include-dashboard=false") if host is head else joined
    sizes = (f"--num-cpus={cpus}", f"--object-store-memory={_OBJECT_STORE_BYTES}")
    address = f"--node-ip-address={host.address}"
    host.run(_BIN / "ray", "start", *role, address, *sizes, env=ray_environment(), stderr=subprocess.DEVNULL)


class HostServer:
    """`skyrl-tinker serve`, or another command, on a host; its API is reached at `url` from this machine."""

    def __init__(self, host: Host, home: Path, *options: str, command: str = "serve") -> None:
        self.home = home
        self.host = host
        home.mkdir(parents=True, exist_ok=True)
        ours = (sys.executable, "-m", "skyrl_tinker", command, "--home", home, "--port", str(API_PORT))
        env = {**ray_environment(), "PATH": os.environ["PATH"]}
        self._log = home.with_suffix(".out").open("wb")
        self._http = httpx.Client(timeout=5)
        self.process = host.popen(
            *ours, *options, env=env, cwd=_ROOT, stdout=self._log, stderr=subprocess.STDOUT
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._relay = host.popen(
                *(sys.executable, "-m", "tests.support.relay", str(listener.fileno()), str(API_PORT)),
                cwd=_ROOT,
                pass_fds=[listener.fileno()],
            )

    def state(self) -> dict[str, Any]:
        """Return what /readyz says; nothing where it cannot be reached."""
        try:
            answer = self._http.get(f"{self.url}/readyz")
        except httpx.TransportError:
            return {}
        found: dict[str, Any] = answer.json()
        return {**found, "ready": answer.status_code == 200}

    def ready(self) -> bool:
        return bool(self.state().get("ready"))

    def wait_ready(self) -> "HostServer":
        within_s = 2 * START_S  # of two replicas on as many cores
        wait_until(lambda: self.ready() or self.process.poll() is not None, within_s)
        assert self.process.poll() is None, self.output()
        return self

    def output(self) -> str:
        return self.home.with_suffix(".out").read_text()

    def close(self) -> None:
        """End it in good order, unless it has ended with its host."""
        for process in (self._relay, self.process):
            process.terminate()
            process.wait()
        self._http.close()
        self._log.close()


@contextmanager
def on_host(host: Host, home: Path, *options: str, command: str = "serve") -> Iterator[HostServer]:
    server = HostServer(host, home, *options, command=command)
    try:
        yield server
    finally:
        server.close()
