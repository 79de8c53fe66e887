"""Kills of every kind while clients train and sample, compared with a quiet run: what scripts/chaos does.

How soon the server is back is a figure of scripts/chaos on a quiet machine; here other tests run beside it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"


@pytest.mark.timeout(900)  # a reboot, and an engine that stands still
def test_two_kills_lose_nothing_and_change_no_bit() -> None:
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--kills", "2", "--seed", "76"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["kills"], report["lost"], report["doubled"]) == (2, 0, 0), done.stdout
    assert report["bit_equal"], done.stdout
