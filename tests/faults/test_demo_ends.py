import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil


def test_ctrl_c_in_the_demo_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "skyrl_tinker.cli", "demo", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as demo:
        started = started_processes(demo.pid)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(20) != 0
    assert not [each for each in started if each.is_running()]


def started_processes(pid: int) -> list[psutil.Process]:
    """All of them, once Ray is among them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = psutil.Process(pid).children(recursive=True)
        if any(each.name() == "raylet" for each in found):
            return found
        time.sleep(0.1)
    raise AssertionError("Ray did not start")
