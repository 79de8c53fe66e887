"""SDKs of other versions do what the newest does: scripts/compat, as a user runs it, on the shared server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Server

ROOT = Path(__file__).parents[2]
NEWEST, EITHER_WAY, JSON_ONLY = "0.38.0", "0.24.1", "0.15.0"
"""The newest first: it leaves an external checkpoint, which the others must not be shown."""


@pytest.mark.timeout(900)
def test_the_newest_an_either_way_and_a_json_only_sdk_do_all_that_they_can(server: Server) -> None:
    command = [sys.executable, "scripts/compat.d/run.py", "--base-url", server.url]
    ended = subprocess.run(
        [*command, NEWEST, EITHER_WAY, JSON_ONLY],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "bench")},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(ended.stdout)
    reports = json.loads(ended.stdout.splitlines()[-1])
    assert {version: report["failed"] for version, report in reports.items()} == dict.fromkeys(
        (NEWEST, EITHER_WAY, JSON_ONLY), {}
    )
    assert [reports[version]["absent"] for version in (NEWEST, EITHER_WAY, JSON_ONLY)] == [1, 7, 16]
    assert ended.returncode == 0
