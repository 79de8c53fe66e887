"""`serve` ends everything that it started, however it ends."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.serve import Serve
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.long

PATIENT = """\
#!{python}
import runpy, sys
from skyrl_tinker.server import supervisor
supervisor._STOP_S = 3600.0
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""A python whose `serve` gives the engine an hour to end."""


def test_a_signal_while_starting_ends_everything_too(start: Callable[..., Serve]) -> None:
    serve = start()
    wait_until(lambda: serve.find("raylet") is not None)
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(PATIENCE_S) == 0
    assert serve.left() == []


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PATIENT.format(python=sys.executable))
    python.chmod(0o700)
    serve = Serve(tmp_path / "home", python=str(python))
    try:
        wait_until(lambda: serve.find("raylet") is not None)
        engine = serve.find("engine")
        assert engine is not None
        engine.suspend()  # so that the first alone would take an hour
        serve.process.send_signal(signal.SIGINT)
        wait_until(lambda: serve.find("API") is None)
        assert engine.status() == psutil.STATUS_STOPPED
        serve.process.send_signal(signal.SIGINT)
        serve.process.wait(PATIENCE_S)
        wait_until(lambda: not serve.left())
    finally:
        serve.close()


def test_nothing_outlives_a_killed_serve(start: Callable[..., Serve]) -> None:
    """Where an engine hangs, the next server ends what is left (test_deaths.py)."""
    serve = start().wait_ready()
    serve.process.kill()
    wait_until(lambda: not serve.left())


def test_an_engine_that_keeps_dying_ends_the_server_with_the_reason(start: Callable[..., Serve]) -> None:
    serve = start()

    def kill_engine() -> bool:
        if serve.process.poll() is None and (engine := serve.find("engine")):
            engine.kill()
        return serve.process.poll() is not None

    wait_until(kill_engine)
    output, errors = serve.process.communicate()
    assert (serve.process.returncode, output) == (1, "")
    *deaths, end = errors.splitlines()
    assert "the engine died 5 times within 120 s" in end
    assert sum("the engine ended (signal SIGKILL), starting it again" in line for line in deaths) == 4
    assert all(line.startswith("skyrl-tinker: ") for line in deaths)
    assert serve.left() == []
