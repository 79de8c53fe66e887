"""What docker/ promises that no engine is needed for."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.support.certificates import write_certificate
from tests.support.plain_server import answering

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


def test_no_service_writes_into_its_image() -> None:
    """A server's files lie in its volumes, or in /tmp and /dev/shm, which are in memory."""
    assert all(service["read_only"] for service in SERVICES.values())
    mounted = ["/data", "/cache", "/tmp", "/dev/shm"]
    for server in SERVERS.values():
        targets = [mount.rpartition(":")[2] for mount in server["volumes"]]
        assert [*targets, *(each.partition(":")[0] for each in server["tmpfs"])] == mounted[:3]
        assert "exec" in server["tmpfs"][0], "libraries that are compiled in /tmp are loaded from there"
        assert server["shm_size"]
    places = vars(Directories(Settings(home=Path("/data"))))
    assert not [name for name, place in places.items() if not str(place).startswith(tuple(mounted))]


def test_compose_mounts_files_that_exist() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    paths = [mount.partition(":")[0] for mount in mounts if mount.startswith(".")]
    assert paths
    assert not [path for path in paths if not (DOCKER / path).exists()]
    assert "server:8000" in (DOCKER / "prometheus" / "prometheus.yml").read_text()


def _enter(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point up to the server's refusal of an option that it does not have."""
    path = f"{DOCKER}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sh", str(DOCKER / "entrypoint"), "serve", "--none-such", *options]
    variables = os.environ | {f"{PREFIX}HOME": str(home), "PATH": path}
    return subprocess.run(command, env=variables, cwd=home.parent, capture_output=True, text=True)


def test_the_first_start_makes_a_key_in_a_file_that_no_log_has(tmp_path: Path) -> None:
    file = tmp_path / "home" / "first-key"
    first = _enter(file.parent)
    assert re.fullmatch(r"tml-[\w-]+\n", file.read_text()), first.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert first.stdout.startswith(f"first-key: {file} has an API key")
    assert "tml-" not in first.stdout + first.stderr
    file.unlink()
    second = _enter(file.parent)
    assert second.stdout == ""
    assert not file.exists()
    assert "No such option: --none-such" in first.stderr
    assert "No such option: --none-such" in second.stderr


def test_an_insecure_start_makes_no_key(tmp_path: Path) -> None:
    start = _enter(tmp_path / "home", "--insecure")
    assert start.stdout == ""
    assert not (tmp_path / "home" / "first-key").exists()
    assert "No such option: --none-such" in start.stderr


def _is_healthy(home: Path, **settings: Any) -> bool:
    """What the check says of a server that was given these as arguments; the variables say others."""
    noted = Settings(home=home, **settings)
    directories = Directories(noted)
    directories.make()
    directories.settings_file.write_text(noted.model_dump_json())
    variables = os.environ | {f"{PREFIX}HOME": str(home), f"{PREFIX}PORT": "1"}
    command = [sys.executable, str(DOCKER / "healthcheck")]
    return subprocess.run(command, env=variables, capture_output=True).returncode == 0


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_health_check_asks_healthz_where_the_server_listens(
    tmp_path: Path, host: str, status: int, healthy: bool
) -> None:
    with answering(status, b"", path="/healthz") as server:
        assert _is_healthy(tmp_path, host=host, port=server.server_port) == healthy


def test_the_health_check_speaks_https_where_the_server_does(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    with answering(200, b"", cert, key, "/healthz") as server:
        assert _is_healthy(tmp_path, port=server.server_port, tls_cert=cert, tls_key=key)


def test_the_image_has_the_scripts_that_run_in_it() -> None:
    copied = (DOCKER / "Dockerfile").read_text()
    for script in ("entrypoint", "first-key", "healthcheck"):
        assert f"docker/{script} " in copied
        assert f"!docker/{script}\n" in (DOCKER.parent / ".dockerignore").read_text()
        assert os.access(DOCKER / script, os.X_OK)


def test_services_of_compose_have_no_privileges() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_images_of_others_are_named_by_digest() -> None:
    base = re.findall(r"^ARG BASE=(.*)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    images = base + [service["image"] for name, service in SERVICES.items() if name not in SERVERS]
    assert len(images) == 3
    assert [image for image in images if re.fullmatch(r"[\w/]+:[\w.-]+@sha256:[0-9a-f]{64}", image)] == images


@pytest.mark.parametrize(("password", "starts"), [("", False), ("admin", False), ("of mine", True)])
def test_grafana_starts_with_a_password_that_not_everybody_knows(password: str, starts: bool) -> None:
    grafana = SERVICES["grafana"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_PASSWORD:-}"
    *shell, script = grafana["entrypoint"]
    command = [*shell, script.replace("$$", "$").replace("exec /run.sh", "echo started")]
    variables = os.environ | {"GF_SECURITY_ADMIN_PASSWORD": password}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode == 0, done.stdout == "started\n") == (starts, starts)
    assert ("GRAFANA_PASSWORD: found none" in done.stderr) != starts
