"""SDKs of other versions do what the newest does: scripts/compat, as a user runs it, on the shared server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serve import Serve

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TOO_NEW = ["scores", "external", "storage", "search", "copy", "finish"]
ABSENT = {
    "0.38.0": ["archive"],
    "0.24.1": ["custom_loss", *TOO_NEW],
    "0.15.0": [
        *TOO_NEW,
        "custom_loss",
        "resume_full_parameters",
        "project",
        "audit",
        "trace",
        "billing",
        "whoami",
    ],
}
"""Steps that a version does not know, or not without torch: of the newest, of one that reads protobuf or
JSON, of one that speaks only JSON. The newest first: it leaves an external checkpoint, which none of the
others may be shown.
"""


@pytest.mark.timeout(900)
def test_the_newest_an_either_way_and_a_json_only_sdk_do_all_that_they_can(server: Serve) -> None:
    ended = subprocess.run(
        [sys.executable, "scripts/compat.d/run.py", "--base-url", server.url, *ABSENT],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "bench")},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(ended.stdout)
    reports = json.loads(ended.stdout.splitlines()[-1])
    assert {version: report["failed"] for version, report in reports.items()} == {key: {} for key in ABSENT}
    for version, steps in ABSENT.items():
        assert sorted(reports[version]["absent"]) == sorted(steps)
    assert ended.returncode == 0
