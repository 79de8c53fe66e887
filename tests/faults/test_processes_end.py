"""`serve` ends everything that it started, however it ends."""

import re
import signal
import time
from collections.abc import Callable

from tests.support.serve import START_S, STOP_S, Serve
from tests.support.waiting import wait_until


def test_a_signal_while_starting_ends_everything_too(start: Callable[..., Serve]) -> None:
    serve = start()
    assert wait_until(lambda: serve.find("raylet") is not None, START_S)
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(STOP_S) == 0
    assert serve.left() == []


def test_a_second_ctrl_c_kills_at_once(start: Callable[..., Serve]) -> None:
    serve = start()
    assert wait_until(lambda: serve.find("raylet") is not None, START_S)
    engine = serve.find("engine")
    assert engine is not None
    engine.suspend()  # so that the first alone takes ten seconds
    serve.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    serve.process.send_signal(signal.SIGINT)
    serve.process.wait(9)
    assert wait_until(lambda: not serve.left(), STOP_S), serve.left()


def test_nothing_outlives_a_killed_serve(start: Callable[..., Serve]) -> None:
    serve = start().wait_ready()
    serve.process.kill()
    assert wait_until(lambda: not serve.left(), STOP_S), serve.left()


def test_a_new_server_ends_what_a_killed_one_left_and_sigterm_ends_it_quietly(
    start: Callable[..., Serve],
) -> None:
    first = start().wait_ready()
    engine = first.find("engine")
    assert engine is not None
    engine.suspend()  # a hung engine does not hear that its parent died
    first.process.kill()
    first.process.wait()
    assert engine.is_running()
    second = start().wait_ready()
    assert first.left() == []
    second.stop()
    output, said = second.process.communicate()
    assert not output.strip()  # the announcement has been read, perhaps without its last line break
    first_line, *phases = said.splitlines()
    assert re.fullmatch(r"skyrl-tinker: ended \d+ processes left by a killed server", first_line)
    assert phases
    assert all(line.startswith(("skyrl-tinker: starting", "skyrl-tinker: waiting for")) for line in phases)


def test_an_engine_that_keeps_dying_ends_the_server_with_the_reason(start: Callable[..., Serve]) -> None:
    serve = start()

    def kill_engine() -> bool:
        if serve.process.poll() is None and (engine := serve.find("engine")):
            engine.kill()
        return serve.process.poll() is not None

    assert wait_until(kill_engine, START_S)
    output, errors = serve.process.communicate()
    assert (serve.process.returncode, output) == (1, "")
    *deaths, end = errors.splitlines()
    assert "the engine died 5 times within 120 s" in end
    assert sum("the engine ended (signal SIGKILL), starting it again" in line for line in deaths) == 4
    assert all(line.startswith("skyrl-tinker: ") for line in deaths)
    assert serve.left() == []
