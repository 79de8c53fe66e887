"""Commands that ask a server, where none answers or it refuses; tests/e2e/test_status.py has the rest."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyrl_tinker.cli.commands import app
from skyrl_tinker.cli.running_server import RunningServer
from skyrl_tinker.cli.server_tables import run_lines, usage_lines
from tests.cli.test_trusted_servers import RUN
from tests.support.plain_server import answering


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def fail(*arguments: str) -> str:
    """Its one line."""
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    return result.stderr


def settings_of(home: Path, text: str) -> Path:
    file = home / "run" / "settings.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("text", ["", '{"host": "127.0', "[]", '{"port": 8000}', '{"host": 1, "port": "x"}'])
def test_settings_that_were_cut_off_are_named(tmp_path: Path, text: str) -> None:
    file = settings_of(tmp_path, text)
    told = f"skyrl-tinker: {file} is damaged: give --url, or start the server again\n"
    assert fail("status", "--home", str(tmp_path)) == told


def test_settings_of_another_version_say_where_its_server_is(tmp_path: Path) -> None:
    values = {"host": "127.0.0.1", "port": 9, "tls_cert": None, "a_setting_of_old": 3}
    settings_of(tmp_path, json.dumps(values))
    assert "no server answers at http://127.0.0.1:9: " in fail("status", "--home", str(tmp_path))


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b'{"detail":"not found: no session nosuch"}', "not found: no session nosuch"),
        (502, b"<html>Bad Gateway", "answered 502: <html>Bad Gateway"),
    ],
)
def test_a_refusal_is_told_in_the_words_of_the_server(status: int, body: bytes, told: str) -> None:
    with answering(status, body) as server:
        assert fail("end", "nosuch", "--url", server.url) == f"skyrl-tinker: {server.url}: {told}\n"


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://localhost:port", "http://localhost:99999", "http://[::1", "http://a b\n"],
)
def test_a_text_that_is_no_url_is_told(url: str) -> None:
    told = f"skyrl-tinker: --url, or TINKER_BASE_URL: found {url!r}, expected http://host:port\n"
    assert fail("status", "--url", url) == told


@pytest.mark.parametrize("body", [b"<html>Welcome", b"{}", b"[]", b'{"state": "ready", "server": null}'])
@pytest.mark.parametrize("command", ["status", "ps", "top", "runs", "usage", "checkpoints list"])
def test_another_program_or_version_behind_the_url_is_told(command: str, body: bytes) -> None:
    with answering(200, body) as server:
        assert "answered in another form than skyrl-tinker " in fail(*command.split(), "--url", server.url)


def test_a_page_that_leads_elsewhere_is_no_answer() -> None:
    with answering(301, b"moved") as server:
        assert fail("status", "--url", server.url) == f"skyrl-tinker: {server.url}: answered 301: moved\n"


@pytest.mark.parametrize("key", ["tml-a\r", "tml-ä", "tml-a b"])
def test_a_key_that_no_header_can_have_is_told_without_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    told = fail("status", "--url", "http://127.0.0.1:9")
    assert (
        told == "skyrl-tinker: TINKER_API_KEY: found white space or a letter beyond ASCII, expected a key\n"
    )


def test_authorities_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "authorities.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    told = fail("status", "--url", "https://127.0.0.1:9")
    assert told.startswith("skyrl-tinker: SSL_CERT_FILE or SSL_CERT_DIR: ")


def test_runs_are_told_with_all_their_steps_and_ages_and_without_those_of_the_tinker_command() -> None:
    resumed = RUN | {"name": "resumed", "parent": "first", "steps_before": 5, "steps": 4, "state": "ready"}
    resumed["last_request_at"] = (datetime.now(UTC) - timedelta(hours=3, minutes=30)).isoformat()
    resumed["last_heartbeat_at"] = datetime.now(UTC).isoformat()
    download = resumed | {"steps": 0, "user_metadata": {"created_by": "tinker checkpoint download"}}
    head, line, hidden, more = filter(None, run_lines({"runs": [resumed, download], "total": 3}))
    assert re.split(r"  +", line)[:4] == ["resumed", "ready", "9", "3 h ago"]
    assert " from=first@5" in line
    assert head.startswith("name")
    assert hidden == "and 1 of the tinker command without steps, which --json has"
    assert more == "and 1 more"


def test_projects_of_runs_have_a_column_where_one_has_a_project() -> None:
    runs = [RUN | {"name": name, "project_id": project} for name, project in (("a", "maths"), ("b", None))]
    heads, first, second = [line for line in run_lines({"runs": runs, "total": 2}) if line][:3]
    assert "  last request  " in heads
    assert "project" in re.split(r"  +", heads)
    assert "maths" in re.split(r"  +", first)
    assert "maths" not in second
    assert "project" not in next(line for line in run_lines({"runs": runs[1:], "total": 1}) if line)


def _shown(columns: int, name: str = "letters") -> list[str]:
    run = RUN | {"name": name, "run_id": f"{'0123456789ab' * 3}:train:0", "state": "ready", "steps": 3}
    told = {
        "last_heartbeat_at": datetime.now(UTC).isoformat(),
        "user_metadata": {"seed": "1", "note": "n" * 9},
    }
    return list(filter(None, run_lines({"runs": [run | told], "total": 1}, columns)))


def test_runs_fit_into_the_terminal_with_their_names_first() -> None:
    heads, row, left_out = _shown(80)
    assert max(map(len, (heads, row))) <= 80
    assert re.split(r"  +", row)[:3] == ["letters", "ready", "3"]
    assert heads.split()[-1] == "run"
    assert row.endswith("  0123456789ab012345678…")
    assert left_out.startswith("no room for hyperparameters, metadata: ")
    heads, row, left_out = _shown(60, "n" * 200)
    assert max(map(len, (heads, row))) <= 60
    assert row.startswith(f"{'n' * 19}…  ready  3")
    assert left_out.startswith("no room for owner, run, hyperparameters, metadata: ")
    *_, row = _shown(200)
    assert row.endswith("seed=1 note=nnnnnnnnn")


@pytest.mark.parametrize("columns", [72, 400])
def test_the_terminal_s_width_counts(columns: int) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with answering(200, json.dumps({"runs": [RUN | {"name": "letters"}], "total": 1}).encode()) as server:
        command = [sys.executable, "-m", "skyrl_tinker", "runs", "--url", server.url]
        subprocess.run(command, stdout=slave, env=environment, check=True)
    heads, row, *_ = os.read(master, 1 << 16).decode().splitlines()
    os.close(slave)
    os.close(master)
    assert max(map(len, (heads, row))) <= columns
    assert heads.endswith("metadata") == (columns == 400)


def test_a_run_whose_script_sends_no_heartbeat_says_for_how_long_while_it_is_in_training() -> None:
    silent = RUN | {"last_heartbeat_at": (datetime.now(UTC) - timedelta(minutes=5, seconds=9)).isoformat()}
    for state, told in (("ready", "ready, silent for 5 min"), ("released", "released")):
        _, line = filter(None, run_lines({"runs": [silent | {"name": "a", "state": state}], "total": 1}))
        assert re.split(r"  +", line)[1] == told


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], {"limit": 20, "sort": "last_request", "order": "descending"}),
        (["-r"], {"limit": 20, "sort": "last_request", "order": "ascending"}),
        (
            ["--search", "a b", "--sort", "reward"],
            {"limit": 20, "search": "a b", "sort": "reward", "order": "descending"},
        ),
        (["--sort", "project"], {"limit": 20, "sort": "project", "order": "ascending"}),
        (["-n", "5", "--sort", "loss"], {"limit": 5, "sort": "loss", "order": "ascending"}),
        (["--sort", "loss", "--reverse"], {"limit": 20, "sort": "loss", "order": "descending"}),
    ],
)
def test_runs_are_searched_and_sorted_by_the_server(
    monkeypatch: pytest.MonkeyPatch, given: list[str], asked: dict[str, object]
) -> None:
    def answer(_: RunningServer, *asked: str, params: dict[str, object]) -> dict[str, object]:
        assert asked == ("GET", "/api/v1/console/runs")
        return {"runs": [], "total": len(params), **params}

    monkeypatch.setattr(RunningServer, "_ask", answer)
    shown = CliRunner().invoke(app, ["runs", "--url", "http://127.0.0.1:9", "--json", *given])
    assert json.loads(shown.stdout) == {"runs": [], "total": len(asked), **asked}


def test_what_ended_many_runs_is_told_once() -> None:
    ended = RUN | {
        "name": "",
        "steps_before": 0,
        "steps": 0,
        "last_request_at": datetime.now(UTC).isoformat(),
    }
    cause = {"state": "lost", "state_reason": "its snapshot cannot be read"}
    several = [ended | cause | {"run_id": f"run-{each}"} for each in range(3)]
    another = ended | {"run_id": "run-3", "state": "failed", "state_reason": "no room"}
    told = list(run_lines({"runs": [*several, another], "total": 4}))
    assert told[-2:] == [
        "run-0, run-1, run-2 are lost: its snapshot cannot be read",
        "run-3 is failed: no room",
    ]


def test_millions_of_tokens_are_told_whole_and_hours_of_little_storage_as_little() -> None:
    def used(user: str, kind: str, **amount: float) -> dict[str, object]:
        return {"user_name": user, "event_info": {"type": kind, **amount}}

    usage = {
        "data": [
            used("ann", "training", token_count=12_345_678),
            used("ann", "training", token_count=1),
            used("ann", "storage", gigabyte_hours=8.4e-05),
            used("bob", "storage", gigabyte_hours=1234.5678),
        ]
    }
    assert [re.split("  +", line) for line in usage_lines(usage)][2:] == [
        ["ann", "storage, GB hours", "under 0.001"],
        ["ann", "trained tokens", "12,345,679"],
        ["bob", "storage, GB hours", "1,234.568"],
    ]
