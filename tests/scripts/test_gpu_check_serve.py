"""scripts/gpu-check --serve --cpu holds here: a whole server, trained and sampled through the SDK."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.long]

GPU_CHECK = Path(__file__).parents[2] / "scripts" / "gpu-check"


@pytest.mark.timeout(600)
def test_a_server_holds_on_a_cpu() -> None:
    command = [sys.executable, str(GPU_CHECK), "--cpu", "--serve"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    prefix = "served tiny, colocated: "
    assert {row["name"] for row in rows if row["ok"] == "-"} == {
        f"{prefix}free GPU memory",
        "served, separate: NCCL",
    }
    held = {row["name"].removeprefix(prefix) for row in rows if row["ok"] == "yes"}
    compared = {f"{what}: logprobs of samplers and trainer" for what in ("an adapter", "all parameters")}
    assert held >= {*compared, "an RL step", "turns to_sampling"}
