"""Which server commands ask, whom they send the key, and what of its answers reaches the terminal."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skyrl_tinker.cli.commands import app
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.system.process_lock import holder, process_lock
from skyrl_tinker.system.processes import listens
from tests.support import plain_server
from tests.support.certificates import write_certificate

HOSTILE = "\x1b[31mred\x1b]0;title\x07\u202e\x9b1m\nfake-run  root  ready"
RUN = {
    "run_id": "run-1",
    "name": HOSTILE,
    "owner": "alice",
    "project_id": None,
    "base_model": "org/tiny",
    "state": "failed",
    "steps": 3,
    "parent": None,
    "steps_before": 0,
    "loss": None,
    "reward": None,
    "loss_fn": None,
    "loss_fn_config": {},
    "lora_rank": None,
    "last": None,
    "last_request_at": "2026-01-01T00:00:00Z",
    "last_heartbeat_at": "2026-01-01T00:00:00Z",
    "user_metadata": {"note": HOSTILE},
    "state_reason": HOSTILE,
}
RUNS = {"runs": [RUN], "total": 1}
answering = partial(plain_server.answering, 200, json.dumps(RUNS).encode())
ELSEWHERE = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    listener.accept()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def note(home: Path) -> Callable[..., Directories]:
    """Writes what a server of the home writes."""

    def write(port: int, **settings: Any) -> Directories:
        noted = Settings(home=home, port=port, **settings)
        directories = Directories(noted)
        directories.make()
        directories.settings_file.write_text(noted.model_dump_json())
        return directories

    return write


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    return "tml-secret"


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["runs", *map(str, arguments)])


def test_the_server_of_a_home_gets_the_key(home: Path, note: Any, key: str) -> None:
    with answering() as server, process_lock(note(server.server_port).server_lock, "server"):
        assert run("--home", home).exit_code == 0
    assert server.keys == [key]


def test_settings_of_another_version_do_not_matter(home: Path, note: Any) -> None:
    with answering() as server:
        directories = note(server.server_port)
        noted = json.loads(directories.settings_file.read_text())
        directories.settings_file.write_text(json.dumps(noted | {"unknown_old_setting": 1}))
        with process_lock(directories.server_lock, "server"):
            assert run("--home", home).exit_code == 0


def test_who_listens_on_the_port_of_a_stopped_server_is_asked_nothing(home: Path, note: Any) -> None:
    with answering() as stranger:
        directories = note(stranger.server_port)
        with process_lock(directories.server_lock, "server"):
            pass
        result = run("--home", home)
    assert stranger.keys == []
    assert result.exit_code == 1
    assert f"that of --home {home} does not run" in result.stderr


def test_who_listens_on_the_last_port_of_a_server_that_starts_is_asked_nothing(home: Path, note: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", ELSEWHERE], stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        port = int(stranger.stdout.readline())
        assert listens(stranger.pid, port)
        with process_lock(note(port).server_lock, "server"):
            result = run("--home", home)
        assert stranger.poll() is None, "somebody connected"
        stranger.kill()
    assert f"that of --home {home} does not run" in result.stderr


def test_the_holder_of_a_lock_is_told_and_not_disturbed(tmp_path: Path) -> None:
    file = tmp_path / "run" / "lock"
    assert holder(file) is None
    file.parent.mkdir()
    with process_lock(file, "server"):
        assert holder(file) == int(file.read_text())
    assert holder(file) is None


@pytest.mark.parametrize("own", [True, False])
def test_https_is_spoken_with_the_certificate_of_the_home_only(
    tmp_path: Path, home: Path, note: Any, own: bool
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (cert, private), (foreign, foreign_private) = write_certificate(tmp_path), write_certificate(other)
    chain = tmp_path / "chain.pem"
    chain.write_text(f"Bag Attributes\n    friendlyName: Größe\n{cert.read_text()}{foreign.read_text()}")
    with answering(*((cert, private) if own else (foreign, foreign_private))) as server:
        lock = note(server.server_port, tls_cert=chain, tls_key=private).server_lock
        with process_lock(lock, "server"):
            result = run("--home", home)
    assert (result.exit_code, len(server.keys)) == ((0, 1) if own else (1, 0))
    if not own:
        assert "certificate verify failed: self-signed certificate; expected " in result.stderr
        assert result.stderr.endswith(f"{chain}; after its renewal send `serve` the signal SIGUSR2\n")


def test_an_option_beats_the_environment(home: Path, note: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering() as named, answering() as own:
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{named.server_port}")
        with process_lock(note(own.server_port).server_lock, "server"):
            assert run("--home", home).exit_code == 0
            assert (len(named.keys), len(own.keys)) == (0, 1)
            file = home / "settings.toml"
            file.write_text(f'home = "{home}"\n')
            assert run("--config", file).exit_code == 0
            assert (len(named.keys), len(own.keys)) == (0, 2)
            monkeypatch.setenv("SKYRL_TINKER_HOME", str(home))
            assert run().exit_code == 0
            assert (len(named.keys), len(own.keys)) == (1, 2)


def test_authorities_of_ssl_cert_file_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    cert, private = write_certificate(tmp_path)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    with answering(cert, private) as server:
        url = f"https://127.0.0.1:{server.server_port}"
        told = f"skyrl-tinker: {url}: certificate verify failed: self-signed certificate; "
        told += "SSL_CERT_FILE: found "
        expected = "none, expected a PEM file with the server's certificate, or with that of the authority "
        assert run("--url", url).stderr == f"{told}{expected}which signed it\n"
        monkeypatch.setenv("SSL_CERT_FILE", str(other := write_certificate(elsewhere)[0]))
        assert run("--url", url).stderr.startswith(f"{told}{other}, ")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert run("--url", url).exit_code == 0
        refused = run("--url", url.replace("127.0.0.1", "0.0.0.0")).stderr
        assert (
            "; --url, or TINKER_BASE_URL: expected a name or an address that the certificate is " in refused
        )


def test_what_clients_wrote_does_nothing_to_the_terminal(home: Path, note: Any) -> None:
    with answering() as server, process_lock(note(server.server_port).server_lock, "server"):
        shown = run("--home", home).stdout
        as_json = run("--home", home, "--json").stdout
    heads, row, reason = shown.splitlines()
    escaped = r"\x1b[31mred\x1b]0;title\x07\u202e\x9b1m\nfake-run  root  ready"
    assert heads.split()[:4] == ["name", "state", "steps", "reward"]
    assert row.startswith(f"{escaped}  failed  ")
    assert row.endswith(f"note={escaped}"[: len(row)])
    assert reason == f"run-1 is failed: {escaped}"
    assert json.loads(as_json) == RUNS
    assert as_json.strip().isprintable()


def test_logs_and_errors_do_nothing_to_the_terminal(home: Path, note: Any) -> None:
    log = note(1).log_dir / "api.log"
    log.write_text("before \x1b[2J after\n")
    assert CliRunner().invoke(app, ["logs", "--home", str(home)]).stdout == "before \\x1b[2J after\n"
    refused = CliRunner().invoke(app, ["logs", "--home", str(home), "--part", "\x1b[2J\n"])
    assert refused.stderr.startswith("skyrl-tinker: --part: found \\x1b[2J\n    , expected one of api")
