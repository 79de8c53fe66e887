"""Ray for one server on this host: only a GCS and a raylet, with a longer limit for their start.

Ray 2.60 has settings for neither, so its node class is replaced during the start. pyproject.toml requires
this release.
"""

import logging
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import node, services
from ray.exceptions import RpcError

from skyrl_tinker.errors import RaySlowError, StartupError

WAITS_S = (60.0, 120.0, 240.0)
"""Limit for Ray to start, by try. Its own limit is 30 s."""
OBJECT_STORE_BYTES = 256 << 20
AGENT = "read -r raylet_ended"
"""Shell command instead of an agent, which a raylet requires: it ends with the raylet, which has the pipe."""
_AGENT_COMMAND = subprocess.list2cmdline(["sh", "-c", AGENT])
_RAYLET_OPTIONS = {
    "--dashboard_agent_command": _AGENT_COMMAND,
    "--runtime_env_agent_command": _AGENT_COMMAND,
    "--maximum_startup_concurrency": os.cpu_count(),  # default 1: samplers and ranks would start one by one
}
_raylet: Any = ray._raylet  # without type hints
_AGENT_PORTS = (
    _raylet.METRICS_AGENT_PORT_NAME,
    _raylet.METRICS_EXPORT_PORT_NAME,
    _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    _raylet.RUNTIME_ENV_AGENT_PORT_NAME,
)
_NO_PORT = -1  # as Ray's own agents write it
_POLL_S, _ASK_S = 0.05, 5.0
_log = logging.getLogger(__name__)


def start(cpus: int, directory: Path | None = None) -> None:
    """Start Ray, which lives as long as the calling thread; try again if it is not up in time.

    `cpus`: bookkeeping only. `directory`: of its files, by default Ray's own.
    Raises RaySlowError after the last try, StartupError if its processes ended.
    """
    for wait_s in WAITS_S[:-1]:
        try:
            _start_once(cpus, directory, wait_s)
        except StartupError as error:
            _log.warning("trying again: %s", error)
        else:
            return
    _start_once(cpus, directory, WAITS_S[-1])


def _start_once(cpus: int, directory: Path | None, wait_s: float) -> None:
    with _replaced(node, "Node", partial(_SmallNode, wait_s)):
        ray.init(
            address="local",  # even if this host is a node of another cluster
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=None if directory is None else str(directory),
        )


class _SmallNode(node.Node):
    """Ray's node without log monitor, autoscaler, dashboard and agents: a server does not use them.

    They took 5 s of CPU time and 300 MB, and the raylet ended if its agents needed longer than 15 s.
    """

    def __init__(self, wait_s: float, **arguments: Any) -> None:
        """Start the processes; end them if they are not up in time, or if one of them ended."""
        self._wait_s = wait_s
        os.environ.update({"RAY_gcs_server_port_wait_time_s": str(math.ceil(wait_s))})
        try:
            super().__init__(**arguments)
        except RuntimeError as error:
            failure = self._failure(error)
            self.kill_all_processes(check_alive=False)
            raise failure from error

    def start_monitor(self) -> None:
        """Skip the autoscaler."""

    def start_log_monitor(self) -> None:
        """Skip it: logs are read where they are written."""

    def start_api_server(self, **options: object) -> None:
        """Skip the dashboard."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        for name in _AGENT_PORTS:
            _raylet.persist_port(self._session_dir, self.node_id, name, _NO_PORT)
        start_process = partial(_start_raylet, services.start_ray_process)
        with _replaced(services, "start_ray_process", start_process):
            super().start_raylet(*arguments, **options)

    def start_ray_processes(self) -> None:
        """Start the raylet and wait until the GCS knows it."""
        super().start_ray_processes()  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + self._wait_s
        while not self._is_registered():
            if self._ended() or time.monotonic() > deadline:
                raise RuntimeError("the raylet has not registered with the GCS")
            time.sleep(_POLL_S)

    def _is_registered(self) -> bool:
        """Ask without a wait: services.get_node waits for half a minute, even for a raylet that has ended."""
        try:
            return bool(self.get_gcs_client().get_all_node_info(timeout=_ASK_S))  # type: ignore[no-untyped-call]
        except RpcError:
            return False

    def _ended(self) -> list[str]:
        dead = self.dead_processes()  # type: ignore[no-untyped-call]
        return [f"{name} (exit code {process.returncode})" for name, process in dead]

    def _failure(self, error: RuntimeError) -> StartupError:
        if ended := self._ended():
            return StartupError(f"Ray did not start: its {' and '.join(ended)} ended")
        return RaySlowError(
            f"Ray was not up within {self._wait_s:.0f} s, at a load of {os.getloadavg()[0]:.1f} on "
            f"{os.cpu_count()} cores: {error}"
        )


def _start_raylet(
    start_process: Callable[..., Any], command: Sequence[str], *rest: Any, **options: Any
) -> Any:
    return start_process([_changed(word) for word in command], *rest, **options)


def _changed(word: str) -> str:
    name = word.partition("=")[0]
    return f"{name}={_RAYLET_OPTIONS[name]}" if name in _RAYLET_OPTIONS else word


@contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    found = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, found)
