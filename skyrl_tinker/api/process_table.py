"""Processes of this server: memory and CPU of each."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from skyrl_tinker.protocol.schemas.now import ProcessUse
from skyrl_tinker.system.processes import Identity, read_pid_file

API = "skyrl_tinker.api.api_process"
_PARTS = {  # text in the command line
    API: "API",
    "skyrl_tinker.engine.engine_process": "engine",
    "ray::RankProcess": "trainer rank",
    "ray::SamplerServer": "Ray: sampler server",
    "raylet/raylet": "Ray: raylet",
    "gcs/gcs_server": "Ray: GCS",
    "VLLM::EngineCore": "vLLM core",
    "VLLM::Worker": "vLLM worker",
    "raylet_ended": "Ray: agent",
    "multiprocessing.resource_tracker": "resource tracker",
    "skyrl_tinker.inference.vllm.vllm_entry": "vLLM server",
    "sglang::": "SGLang worker",
    "sglang_entry.py": "SGLang server",
    "vllm::router": "router",
}


class ProcessTable:
    """Reader of the processes that `serve` has written down, in a thread of one caller at a time."""

    def __init__(self, pid_file: Path) -> None:
        self._pid_file = pid_file
        self._known: dict[int, psutil.Process] = {}

    def rows(
        self, server: Identity | None, gpu_bytes: Mapping[int, int], base_models: Mapping[int, str]
    ) -> list[ProcessUse]:
        """Return `server`, the process of `serve`, and its descendants, as of some seconds ago.

        `gpu_bytes`: by pid. `base_models`: by the pids of ranks and sampling servers.
        """
        listed = read_pid_file(self._pid_file)
        self._know([*([] if server is None else [server]), *listed])
        return [
            row
            for process in self._known.values()
            if (row := self._row(process, gpu_bytes, base_models)) is not None
        ]

    def _know(self, identities: Iterable[Identity]) -> None:
        """Keep the objects of processes seen before: they remember when the CPU time was read."""
        known = {}
        for identity in identities:
            process = self._known.get(identity.pid) or identity.find()
            if process is not None and process.is_running():
                known[identity.pid] = process
        self._known = known

    def _row(
        self, process: psutil.Process, gpu_bytes: Mapping[int, int], base_models: Mapping[int, str]
    ) -> ProcessUse | None:
        """Return the memory and CPU of a process, None if it has ended."""
        try:
            with process.oneshot():
                return ProcessUse(
                    name=_name(process),
                    pid=process.pid,
                    base_model=self._base_model(process, base_models),
                    rss_bytes=process.memory_info().rss,
                    gpu_bytes=gpu_bytes.get(process.pid),
                    cpu_percent=process.cpu_percent(),
                    age_s=max(0.0, time.time() - process.create_time()),
                )
        except psutil.Error:
            return None

    def _base_model(self, process: psutil.Process | None, base_models: Mapping[int, str]) -> str | None:
        """Return that of a process, or of the next one above it that has one."""
        while process is not None and process.pid not in base_models:
            process = self._known.get(process.ppid())
        return None if process is None else base_models[process.pid]


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    command = " ".join(words)
    part = next((name for text, name in _PARTS.items() if text in command), None)
    if part == _PARTS[API] and words[-1].startswith("api-"):
        return f"{part} {words[-1].removeprefix('api-')}"
    return part or ("serve" if " serve" in command else process.name())
