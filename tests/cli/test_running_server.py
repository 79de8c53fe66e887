"""Commands that ask a server, where none answers or it refuses; tests/e2e/test_status.py has the rest."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from skyrl_tinker.cli.commands import app


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


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b'{"detail":"not found: no session nosuch"}', "not found: no session nosuch"),
        (502, b"<html>Bad Gateway", "answered 502: <html>Bad Gateway"),
    ],
)
def test_a_refusal_is_told_in_the_words_of_the_server(status: int, body: bytes, told: str) -> None:
    with answering(status, body) as url:
        assert fail("end", "nosuch", "--url", url) == f"skyrl-tinker: {url}: {told}\n"
