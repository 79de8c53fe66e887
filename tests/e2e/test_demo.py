import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.serve import Serve

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


def test_the_reward_rises_by_learning_whatever_the_seed(server: Serve, tmp_path: Path) -> None:
    """Two runs at once, as two users of one server."""
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
    runs = {}
    for seed in range(2):
        out = tmp_path / str(seed)
        command = [sys.executable, str(EXAMPLE), f"--seed={seed}", "--steps=30", f"--out={out}"]
        runs[out] = subprocess.Popen(command, env=environment)
    written: list[list[int]] = []
    for out, run in runs.items():
        assert run.wait() == 0, "the reward did not rise"
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        written.append([step["step"] for step in steps])
        assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    wanted = {"search": "rl_loop: next letter", "limit": "2"}
    found = httpx.get(f"{server.url}/api/v1/console/runs", params=wanted).json()["runs"]
    assert sorted(written) == sorted([*range(run["steps"] - 30, run["steps"])] for run in found)
    for run in found:
        told = httpx.get(f"{server.url}/api/v1/console/runs/{run['run_id']}/metrics").json()["reports"]
        assert [report["step"] for report in told] == list(range(run["steps"] - 30, run["steps"]))
