"""What docker/ promises that no engine is needed for."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_tinker.config import Settings

DOCKER = Path(__file__).parents[1] / "docker"
SERVICES: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
SERVERS = {name: service for name, service in SERVICES.items() if name.startswith("server")}
PREFIX = "SKYRL_TINKER_"


def test_every_variable_of_compose_is_a_setting_and_on_the_page() -> None:
    names = {name for server in SERVERS.values() for name in server["environment"]}
    assert {name.removeprefix(PREFIX).lower() for name in names if name.startswith(PREFIX)} <= (
        Settings.model_fields.keys()
    )
    page = (DOCKER.parent / "docs" / "docker.md").read_text()
    outer = re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text())
    assert not [name for name in {*names, *outer} if f"`{name}`" not in page]


def test_each_profile_has_one_server() -> None:
    profiles = [profile for server in SERVERS.values() for profile in server["profiles"]]
    assert sorted(profiles) == ["cpu", "gpu", "gpus"]
    assert all(service["profiles"] for service in SERVICES.values())


def test_compose_builds_with_arguments_that_the_dockerfile_has() -> None:
    for server in SERVERS.values():
        dockerfile = (DOCKER / server["build"]["context"] / server["build"]["dockerfile"]).read_text()
        for argument in server["build"]["args"]:
            assert f"\nARG {argument.partition('=')[0]}=" in dockerfile


def test_compose_mounts_files_that_exist() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    paths = [mount.partition(":")[0] for mount in mounts if mount.startswith(".")]
    assert paths
    assert not [path for path in paths if not (DOCKER / path).exists()]
    assert "server:8000" in (DOCKER / "prometheus" / "prometheus.yml").read_text()


def _enter(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point up to the server's refusal of an option that it does not have."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sh", str(DOCKER / "entrypoint"), "serve", "--none-such", *options]
    variables = os.environ | {f"{PREFIX}HOME": str(home), "PATH": path}
    return subprocess.run(command, env=variables, cwd=home.parent, capture_output=True, text=True)


def test_the_first_start_makes_a_key_and_prints_it_once(tmp_path: Path) -> None:
    first, second = _enter(tmp_path / "home"), _enter(tmp_path / "home")
    assert re.search(r"^  export TINKER_API_KEY=tml-[\w-]+$", first.stdout, re.MULTILINE), first.stderr
    assert second.stdout == ""
    assert "No such option: --none-such" in first.stderr
    assert "No such option: --none-such" in second.stderr


def test_an_insecure_start_makes_no_key(tmp_path: Path) -> None:
    start = _enter(tmp_path / "home", "--insecure")
    assert start.stdout == ""
    assert "No such option: --none-such" in start.stderr


@contextmanager
def _answering(status: int) -> Iterator[int]:
    """A server whose /healthz has that status; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_asks_healthz_on_the_servers_port(status: int, healthy: bool) -> None:
    with _answering(status) as port:
        variables = os.environ | {f"{PREFIX}PORT": str(port)}
        command = [sys.executable, str(DOCKER / "healthcheck")]
        check = subprocess.run(command, env=variables, capture_output=True)
    assert (check.returncode == 0) == healthy
