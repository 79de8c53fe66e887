"""`serve` ends everything that it started, however it ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.serve import START_S, STOP_S, Serve, wait_until


def assert_ends_quietly(serve: Serve, signum: signal.Signals) -> None:
    serve.process.send_signal(signum)
    assert serve.process.wait(STOP_S) == 0
    assert serve.left() == []
    assert serve.process.communicate() == ("", "")


def test_a_signal_ends_everything_with_exit_code_0(start: Callable[..., Serve]) -> None:
    assert_ends_quietly(start().wait_ready(), signal.SIGTERM)


def test_a_signal_while_starting_ends_everything_too(start: Callable[..., Serve]) -> None:
    serve = start()
    assert wait_until(lambda: serve.find("raylet") is not None, START_S)
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(STOP_S) == 0
    assert serve.left() == []


def test_a_second_ctrl_c_kills_at_once(start: Callable[..., Serve]) -> None:
    serve = start()
    assert wait_until(lambda: serve.find("raylet") is not None, START_S)
    serve.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    serve.process.send_signal(signal.SIGINT)
    serve.process.wait(2)
    assert serve.left() == []


def test_nothing_outlives_a_killed_serve(start: Callable[..., Serve]) -> None:
    serve = start().wait_ready()
    serve.process.kill()
    assert wait_until(lambda: not serve.left(), STOP_S), serve.left()


def test_a_new_server_ends_what_a_killed_one_left_and_ctrl_c_ends_it(start: Callable[..., Serve]) -> None:
    first = start().wait_ready()
    engine = first.find("engine")
    assert engine is not None
    engine.suspend()  # a hung engine does not hear that its parent died
    first.process.kill()
    first.process.wait()
    assert engine.is_running()
    second = start().wait_ready()
    assert first.left() == []
    assert_ends_quietly(second, signal.SIGINT)


def test_an_engine_that_keeps_dying_ends_the_server_with_the_reason(start: Callable[..., Serve]) -> None:
    serve = start()

    def kill_engine() -> bool:
        if serve.process.poll() is None and (engine := serve.find("engine")):
            engine.kill()
        return serve.process.poll() is not None

    assert wait_until(kill_engine, START_S)
    output, errors = serve.process.communicate()
    assert (serve.process.returncode, output) == (1, "")
    assert errors.count("\n") == 1
    assert "the engine died 5 times within 120 s" in errors
    assert serve.left() == []


def test_a_home_that_is_in_use_and_a_port_that_is_taken_are_refused_in_one_line(
    server: Serve, tmp_path: Path
) -> None:
    home = server.process.args[5]  # type: ignore[index]
    port = server.url.rsplit(":", 1)[1]
    for options, message in (
        (["--home", str(home), "--port", "0"], "another server"),
        (["--home", str(tmp_path), "--port", port], "choose another --port"),
    ):
        refused = subprocess.run(
            [sys.executable, "-m", "skyrl_tinker", "serve", *options],
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 1
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert server.ready()
