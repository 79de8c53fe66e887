import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serve import Serve

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


@pytest.mark.parametrize("users", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_reward_rises_by_learning_whatever_the_seed(server: Serve, users: int, tmp_path: Path) -> None:
    """The users' runs are at once."""
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
    runs = {}
    for seed in range(users):
        out = tmp_path / str(seed)
        command = [sys.executable, str(EXAMPLE), f"--seed={seed}", "--steps=30", f"--out={out}"]
        runs[out] = subprocess.Popen(command, env=environment)
    for out, run in runs.items():
        assert run.wait() == 0, "the reward did not rise"
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps] == list(range(30))
        assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
