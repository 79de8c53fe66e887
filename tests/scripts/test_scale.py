"""A short form of scripts/bench/scale.py: 64 replicas answer all samples."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCALE = Path(__file__).parents[2] / "scripts" / "bench" / "scale.py"


def test_samples_of_a_long_queue_are_all_answered_by_64_replicas() -> None:
    """Costs are not asserted: other tests run beside this one."""
    command = [sys.executable, str(SCALE), "--samples", "200", "--waiting", "5000", "--answer-ms", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["errors"] == 0, done.stdout
    assert report["samples_per_s_64"] > 0
