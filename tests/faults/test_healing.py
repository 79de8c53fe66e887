"""`serve` replaces whatever dies under it, and is alone in its home."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_tinker.directories import LOG_BYTES
from tests.support.kills import assert_healed, find
from tests.support.serve import CORE, Serve, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("healing")) as healing:
        yield healing


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("API", signal.SIGSTOP),
        ("engine", signal.SIGSTOP),
        ("trainer", signal.SIGSTOP),
        ("vLLM server", signal.SIGKILL),
        (CORE, signal.SIGSTOP),
    ],
)
def test_it_heals_when_one_is_killed_or_stopped(server: Serve, kind: str, how: signal.Signals) -> None:
    """Other deaths, with clients that work meanwhile, are in test_deaths.py."""
    wait_until(server.ready)
    victim = find(server, kind)
    victim.send_signal(how)
    assert_healed(server, kind, victim)


def test_a_pid_file_that_cannot_be_written_ends_nothing(server: Serve) -> None:
    """As on a full disk."""
    wait_until(server.ready)
    pid_file = server.home / "run" / "processes.json"
    pid_file.unlink()
    pid_file.mkdir()
    test_it_heals_when_one_is_killed_or_stopped(server, CORE, signal.SIGKILL)
    pid_file.rmdir()
    wait_until(pid_file.is_file)


def test_a_log_that_grows_is_emptied_and_written_on(server: Serve) -> None:
    wait_until(server.ready)
    log = server.home / "logs" / "engine.log"
    lines = b"a line\n" * (LOG_BYTES // 7 + 1)
    with log.open("ab") as file:
        file.write(lines)
    wait_until(lambda: log.stat().st_size < LOG_BYTES)
    assert log.with_name("engine.log.1").read_bytes().endswith(lines)
    test_it_heals_when_one_is_killed_or_stopped(server, "vLLM server", signal.SIGKILL)
    wait_until(lambda: b"is lost and is replaced" in log.read_bytes())
    assert b"\0" not in log.read_bytes()


def test_an_api_that_keeps_dying_ends_neither_the_server_nor_the_engine(server: Serve) -> None:
    engine, killed = server.find("engine"), set[int]()

    def kill_another() -> bool:
        api = server.find("API")
        if api is not None and api.pid not in killed:
            api.kill()
            killed.add(api.pid)
        return len(killed) == 6

    wait_until(kill_another)
    wait_until(server.ready)
    assert server.find("engine") == engine


def test_a_second_engine_is_refused_and_the_first_goes_on(server: Serve) -> None:
    command = [sys.executable, "-m", "skyrl_tinker", "engine", str(server.home / "run" / "settings.json")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    engine = server.find("engine")
    assert engine is not None
    assert f"another engine (pid {engine.pid}) runs with --home {server.home}" in refused.stderr
    assert server.ready()


def test_a_home_that_is_in_use_and_a_port_that_is_taken_are_refused_in_one_line(
    server: Serve, tmp_path: Path
) -> None:
    port = server.url.rsplit(":", 1)[1]
    for options, message in (
        (["--home", str(server.home), "--port", "0"], "another server"),
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
