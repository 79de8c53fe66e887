"""The demo with a real SGLang in place of vLLM: the same loop, whose samples have no seeds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sglang_cpu.sglang_server import interpreter

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 20


def test_the_policy_learns(tmp_path: Path) -> None:
    demo = [sys.executable, "-m", "skyrl_tinker", "demo", "--sampler-engine", "sglang", f"--steps={STEPS}"]
    done = subprocess.run([*demo, "--sampler-python", str(interpreter()), f"--out={tmp_path}"], check=False)
    assert done.returncode == 0, "the reward did not rise"
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
