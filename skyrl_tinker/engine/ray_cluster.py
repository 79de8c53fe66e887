"""Ray cluster of one server: a small local one, or an existing one."""

import logging
import shutil
from pathlib import Path

import psutil
import ray

from skyrl_tinker.config import Settings
from skyrl_tinker.engine import local_ray
from skyrl_tinker.errors import StartupError, TrainerLostError

DAEMONS = ("gcs_server", "raylet")


class RayCluster:
    def __init__(self, settings: Settings, directory: Path) -> None:
        """Start or join the cluster.

        Call it on the main thread, before the event loop: a local cluster dies with the thread that started
        it. `directory`: private to this server, with a short path, since Ray's sockets are below it.
        """
        self._directory = directory
        self._remove_files()
        directory.mkdir()
        if settings.ray_address is None:
            local_ray.start(settings.all_trainer_ranks, directory)  # one CPU for each rank
        else:
            _join(settings.ray_address)
        self._daemons = [child for child in psutil.Process().children() if child.name() in DAEMONS]

    @property
    def address(self) -> str:
        """IP address of this host in the cluster: loopback in one of our own."""
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def require_alive(self) -> None:
        """Raise TrainerLostError when a local daemon died: calls to actors would hang before they fail."""
        if (pid := self._dead()) is not None:
            raise TrainerLostError(f"a process of Ray died (pid {pid})")

    def answers(self) -> bool:
        """Return whether Ray can be called: without its daemons a call waits for a minute."""
        return self._dead() is None

    def _dead(self) -> int | None:
        """Return the pid of a local daemon that died."""
        for daemon in self._daemons:
            if not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE:
                return daemon.pid
        return None

    @property
    def gpus(self) -> int:
        """GPUs of all hosts."""
        return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]

    def require_gpus(self, trainer: int, samplers: int, on_demand: int = 0) -> None:
        """Raise StartupError if the cluster has fewer GPUs: actors would wait for them indefinitely.

        `on_demand`: of the largest base model on demand, beside those of the others.
        """
        needed = trainer + samplers + on_demand
        if self.gpus < needed:
            largest = f", {on_demand} for the largest base model on demand" if on_demand else ""
            raise StartupError(
                f"--device cuda needs {needed} GPUs ({trainer} for trainer ranks, {samplers} "
                f"for samplers{largest}), found {self.gpus}"
            )

    def stop(self) -> None:
        if self.answers():
            ray.shutdown()
        self._remove_files()

    def _remove_files(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _join(address: str) -> None:
    """Join a cluster of which this host is a node. Raises StartupError."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:  # also other versions, and wrong tokens
        reason = " ".join(str(error).split())
        raise StartupError(
            f"--ray-address {address}: this host is in no Ray cluster that answers there; start one with "
            f"`ray start`, with the same RAY_AUTH_TOKEN (docs/cluster.md): {reason}"
        ) from error
