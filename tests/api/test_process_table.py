"""Processes of a server: their memory, and the base models that they work for."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skyrl_tinker.api.process_table import ProcessTable
from skyrl_tinker.system.processes import identities, write_pid_file

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], check=False)"


@pytest.fixture
def parent() -> Iterator[psutil.Popen]:
    with psutil.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as process:
        while not process.children():
            assert process.poll() is None
        yield process
        process.stdin.close()


def test_a_process_below_one_of_a_base_model_is_of_it_too(parent: psutil.Popen, tmp_path: Path) -> None:
    (child,) = parent.children()
    own = psutil.Process()
    write_pid_file(tmp_path / "pids", identities((own, parent, child)))
    rows = ProcessTable(tmp_path / "pids").rows(None, {child.pid: 7}, {parent.pid: "b"})
    found = {row.pid: (row.base_model, row.gpu_bytes) for row in rows}
    assert found == {own.pid: (None, None), parent.pid: ("b", None), child.pid: ("b", 7)}
    assert all(row.rss_bytes > 0 for row in rows)
