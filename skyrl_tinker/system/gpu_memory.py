"""Memory of this host's NVIDIA GPUs by nvidia-smi, which needs no torch and knows the processes of others."""

import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

SMI = "nvidia-smi"
LIMIT_S = 10.0
_MIB = 1 << 20


class GpuMemory(NamedTuple):
    """Bytes: of each GPU in use and in all, and in use by each process on all of them, by its pid.

    A container without the pids of its host knows no process.
    """

    gpus: tuple[tuple[int, int], ...] = ()
    by_pid: Mapping[int, int] = {}


def gpu_memory() -> GpuMemory:
    """Return the memory of all GPUs: none where nvidia-smi is not there, fails, or does not tell it.

    It tells none of a GPU that shares the host's memory.
    """
    try:
        gpus = tuple(
            (int(used) * _MIB, int(total) * _MIB) for used, total in smi("gpu", "memory.used", "memory.total")
        )
        by_pid: Counter[int] = Counter()
        for pid, used in smi("compute-apps", "pid", "used_gpu_memory"):
            if used.isdecimal():  # of processes in a MIG instance it is [N/A]
                by_pid[int(pid)] += int(used) * _MIB
    except (OSError, ValueError):
        return GpuMemory()
    return GpuMemory(gpus, by_pid)


def smi(subject: str, *facts: str) -> list[list[str]]:
    """Return a row of facts for each GPU, or of `compute-apps` for each process on one.

    Raises FileNotFoundError without nvidia-smi, OSError with its words if it fails, or takes over LIMIT_S.
    """
    query = [SMI, f"--query-{subject}={','.join(facts)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:  # as when a GPU hangs
        raise OSError(f"no answer within {LIMIT_S:.0f} s") from error
    if ended.returncode:
        raise OSError(ended.stdout.strip() or ended.stderr.strip())
    return [line.split(", ") for line in ended.stdout.splitlines()]
