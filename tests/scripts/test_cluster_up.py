"""Hosts of namespaces on this machine, and a Ray cluster on them."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import why_not
from tests.support.processes import is_zombie

pytestmark = [pytest.mark.servers, pytest.mark.long]

ROOT = Path(__file__).parents[2]
NODES = """
import ray
ray.init("auto", log_to_driver=False)
print(sorted(node["NodeManagerAddress"] for node in ray.nodes()))
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_command_runs_on_the_first_of_several_hosts_and_nothing_is_left() -> None:
    command = [sys.executable, str(ROOT / "scripts/cluster-up"), "--hosts", "2", sys.executable, "-c", NODES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "['10.77.0.1', '10.77.0.2']"
    (first,) = {line.rpartition(" ")[2] for line in ended.stderr.splitlines() if line.startswith("host 1:")}
    assert not psutil.pid_exists(int(first)) or is_zombie(psutil.Process(int(first)))
