import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


def test_ctrl_c_in_the_demo_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    before = server_directories()
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
    assert not list((tmp_path / "tmp").iterdir())
    assert server_directories() <= before


def server_directories() -> set[Path]:
    """What servers keep outside their homes: sockets and ephemeral weights."""
    return {path for root in ("/tmp", "/dev/shm") for path in Path(root).glob("skyrl-tinker-*/*")}


def started_processes(pid: int) -> list[psutil.Process]:
    """All of them, once Ray is among them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = psutil.Process(pid).children(recursive=True)
        if any(each.name() == "raylet" for each in found):
            return found
        time.sleep(0.1)
    raise AssertionError("Ray did not start")
