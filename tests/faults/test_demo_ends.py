import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.support.processes import below, heed_ctrl_c
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.long


def test_ctrl_c_in_the_demo_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "skyrl_tinker", "demo", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    ) as demo:
        started = started_processes(demo.pid)
        directories = Directories(Settings(home=next((tmp_path / "tmp").glob("skyrl-tinker-demo-*"))))
        assert directories.bell_dir.exists()
        assert directories.ephemeral_dir.exists()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE_S) != 0
    assert not [each for each in started if each.is_running()]
    assert not list((tmp_path / "tmp").iterdir())
    assert not directories.bell_dir.exists()
    assert not directories.ephemeral_dir.exists()


def started_processes(pid: int) -> list[psutil.Process]:
    """All of them, once Ray is among them."""
    wait_until(lambda: any(each.name() == "raylet" for each in below(pid)))
    return below(pid)
