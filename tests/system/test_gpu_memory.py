"""Memory of GPUs, as a program named nvidia-smi tells it."""

import os
from pathlib import Path

import pytest

from skyrl_tinker.system.gpu_memory import GpuMemory, gpu_memory

MIB = 1 << 20
GPUS, PROCESSES = "1000, 81559\n3, 81559\n", "17, 600\n17, 200\n18, [N/A]\n"


@pytest.mark.parametrize(
    ("ends", "gpus", "expected"),
    [
        ("exit 0", GPUS, GpuMemory(((1000 * MIB, 81559 * MIB), (3 * MIB, 81559 * MIB)), {17: 800 * MIB})),
        ("exit 9", GPUS, GpuMemory()),
        ("exit 0", "[N/A], [N/A]\n", GpuMemory()),
        ("exec sleep 600", GPUS, GpuMemory()),
    ],
    ids=["told", "failed", "shared with the host", "hangs"],
)
def test_the_memory_of_gpus_and_of_their_processes_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, gpus: str, expected: GpuMemory
) -> None:
    program = tmp_path / "nvidia-smi"
    answers = f"case $1 in *query-gpu*) printf '{gpus}' ;; *) printf '{PROCESSES}' ;; esac"
    program.write_text(f"#!/bin/sh\n{answers}\n{ends}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if "sleep" in ends:
        monkeypatch.setattr("skyrl_tinker.system.gpu_memory.LIMIT_S", 0.5)
    assert gpu_memory() == expected


def test_without_nvidia_smi_no_gpu_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() == GpuMemory()
