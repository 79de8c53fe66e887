"""`serve` replaces whatever dies under it, and is alone in its home."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.support.serve import CORE, HEAL_S, Serve, serving
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Its own one: most of the deaths here are also the engine's. Its logs may have 1 MB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYRL_TINKER_LOG_MB", "1")
        with serving(tmp_path_factory.mktemp("healing")) as healing:
            yield healing


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("API", signal.SIGKILL),
        ("API", signal.SIGSTOP),
        ("trainer", signal.SIGSTOP),
        ("raylet", signal.SIGKILL),
        ("GCS", signal.SIGKILL),
    ],
)
def test_it_heals_when_one_is_killed_or_stopped(server: Serve, kind: str, how: signal.Signals) -> None:
    """All kinds of processes, with those that other tests here kill.

    tests/faults/test_engine_death.py and test_trainer_death.py kill more, test_chaos.py stops an engine.
    """
    victim = server.find(kind)
    assert victim is not None
    victim.send_signal(how)

    def healed() -> bool:
        found = server.find(kind)
        return found is not None and found != victim and server.ready()

    assert wait_until(healed, HEAL_S)
    if kind in ("raylet", "GCS"):  # without them a call of Ray's waits for a minute, then ends the process
        log = (server.home / "logs" / "engine.log").read_text()
        assert f"ended: a process of Ray died (pid {victim.pid})" in log
    assert wait_until(lambda: not server.unreaped(), 30)
    current = server.tree()
    assert wait_until(
        lambda: not [each for each in server.seen if each not in current and each.is_running()], 30
    )


def test_a_dead_engine_leaves_no_temporary_files(server: Serve) -> None:
    temporary = Directories(Settings(home=server.home)).bell_dir
    test_it_heals_when_one_is_killed_or_stopped(server, "engine", signal.SIGKILL)
    assert wait_until(lambda: server.find("vLLM server") is not None, HEAL_S)
    assert len(list(temporary.rglob("vllm-*"))) == 1


def test_a_pid_file_that_cannot_be_written_ends_nothing(server: Serve) -> None:
    """As on a full disk."""
    assert wait_until(server.ready, HEAL_S)
    pid_file = server.home / "run" / "processes.json"
    pid_file.unlink()
    pid_file.mkdir()
    test_it_heals_when_one_is_killed_or_stopped(server, CORE, signal.SIGSTOP)
    pid_file.rmdir()
    assert wait_until(pid_file.is_file, HEAL_S)


def test_a_log_that_grows_is_emptied_and_written_on(server: Serve) -> None:
    assert wait_until(server.ready, HEAL_S)
    log = server.home / "logs" / "engine.log"
    with log.open("ab") as file:
        file.write(b"a line\n" * (1 << 18))
    assert wait_until(lambda: log.stat().st_size < 1 << 20, HEAL_S)
    assert log.with_name("engine.log.1").read_bytes().endswith(b"a line\n" * (1 << 18))
    test_it_heals_when_one_is_killed_or_stopped(server, "vLLM server", signal.SIGKILL)
    assert wait_until(lambda: b"is lost and is replaced" in log.read_bytes(), HEAL_S)
    assert b"\0" not in log.read_bytes()


def test_an_api_that_keeps_dying_ends_neither_the_server_nor_the_engine(server: Serve) -> None:
    engine, killed = server.find("engine"), set[int]()
    while len(killed) < 6:
        api = server.find("API")
        if api is not None and api.pid not in killed:
            api.kill()
            killed.add(api.pid)
        time.sleep(0.05)
    assert wait_until(server.ready, HEAL_S)
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
