"""`serve` replaces whatever dies under it, and is alone in its home."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serve import HEAL_S, KINDS, Serve, serving, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Its own one: most of the deaths here are also the engine's."""
    with serving(tmp_path_factory.mktemp("healing")) as healing:
        yield healing


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "router"])
def test_it_heals_when_one_is_killed(server: Serve, kind: str) -> None:
    victim = server.find(kind)
    assert victim is not None
    victim.kill()

    def healed() -> bool:
        found = server.find(kind)
        return found is not None and found != victim and server.ready()

    assert wait_until(healed, HEAL_S)
    current = server.tree()
    assert wait_until(
        lambda: not [each for each in server.seen if each not in current and each.is_running()], 10
    )


def test_a_pid_file_that_cannot_be_written_ends_nothing(server: Serve) -> None:
    """As on a full disk."""
    assert wait_until(server.ready, HEAL_S)
    pid_file = server.home / "run" / "processes.json"
    pid_file.unlink()
    pid_file.mkdir()
    test_it_heals_when_one_is_killed(server, "vLLM engine core")
    pid_file.rmdir()
    assert wait_until(pid_file.is_file, HEAL_S)


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
