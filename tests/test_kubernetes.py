"""Manifests of docker/kubernetes: schemas of Kubernetes, our settings and checks, and the page on them."""

import re
import shlex
import socket
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from typer.main import get_command

from skyrl_tinker import config
from skyrl_tinker.cli.commands import app
from skyrl_tinker.config import Settings
from skyrl_tinker.server import preflight
from skyrl_tinker.store.database.opening import file_of
from tests.support.pods import Container, manifests, pod_templates, pods

VERSION = "1.37"
PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
GIVEN = {
    "ray-token": "c1" * 32,
    "database-url": "postgresql+psycopg://tinker@db/tinker",
    "status.podIP": "10.1.2.3",
}


def commands(container: Container) -> Iterator[list[str]]:
    """Yield the arguments of each call of ours, as a shell reads them with the container's variables."""
    words = container.command
    for line in (words[-1] if words[:2] == ["bash", "-c"] else shlex.join(words)).splitlines():
        if call := re.search(r"\bskyrl-tinker (.*)", line):
            yield shlex.split(string.Template(call[1]).substitute(container.variables(GIVEN)))


CALLS = [
    pytest.param(container, call, id=call[0])
    for containers in pods().values()
    for container in containers
    for call in commands(container)
]


@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda each: f"{each['kind']} {each['metadata']['name']}"
)
def test_manifests_follow_the_schemas(manifest: dict[str, Any]) -> None:
    """Pods of a RayCluster, whose own schema comes with KubeRay, are checked as any others."""
    if manifest["apiVersion"] == "ray.io/v1":
        templates = list(pod_templates(manifest))
        assert len(templates) == 2
        for template in templates:
            pod = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "ray"},
                "template": template,
            }
            kubernetes_validate.validate(pod, VERSION, strict=True)
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_wrong_manifest_would_be_refused() -> None:
    service = next(each for each in manifests() if each["kind"] == "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {"prots": []}}, VERSION, strict=True)


def test_the_commands_are_those_of_a_server_and_of_api_processes() -> None:
    assert sorted(call.values[1][0] for call in CALLS) == ["api", "serve"]


@pytest.mark.parametrize(("container", "call"), CALLS)
def test_each_command_passes_the_checks_of_a_start(
    container: Container, call: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in container.variables(GIVEN).items():
        monkeypatch.setenv(name, value)
    name, *arguments = call
    given = get_command(app).commands[name].make_context(name, arguments).params
    own = {name: value for name, value in given.items() if name in Settings.model_fields}
    settings = config.load(**own)
    with socket.create_server(("127.0.0.1", 0)) as ray:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{ray.getsockname()[1]}")
        preflight.check_settings(settings)
    assert file_of(settings.store_url) is None
    assert settings.port == container.port("http")
    if name == "serve":
        assert settings.engine_address == (GIVEN["status.podIP"], container.port("engine"))


def test_the_longest_sequence_is_not_left_to_the_default() -> None:
    """That is far below the model's."""
    *_, server = pods()["server"]
    assert "SKYRL_TINKER_CONTEXT_LENGTH" in server.variables(GIVEN)
    assert "SKYRL_TINKER_CONTEXT_LENGTH" in PAGE.read_text()


def test_there_is_a_key_before_a_server_starts() -> None:
    """Without one, an address that others reach is refused."""
    first, server = pods()["server"]
    assert first.command == ["first-key"]
    assert first.variables(GIVEN) == server.variables(GIVEN)


def test_api_processes_reach_the_engine_through_the_policy() -> None:
    (policy,) = [each for each in manifests() if each["kind"] == "NetworkPolicy"]
    _, server = pods()["server"]
    from_cluster, from_api = policy["spec"]["ingress"]
    assert from_cluster["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert from_api["ports"] == [{"port": server.port("engine")}]
    (deployment,) = [each for each in manifests() if each["kind"] == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert from_api["from"] == [{"podSelector": {"matchLabels": labels}}]


def test_pods_may_run_in_a_restricted_namespace() -> None:
    for template in pod_templates(manifests()):
        user = template["spec"]["securityContext"]
        assert user["runAsNonRoot"]
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    for containers in pods().values():
        for container in containers:
            closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container.spec["securityContext"] == closed


def test_ray_tells_nobody_about_the_cluster() -> None:
    nodes = [
        container.spec["env"] for pod in pods().values() for container in pod if "RAY_" in str(container)
    ]
    assert len(nodes) > 1
    assert all({"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in environment for environment in nodes)


def test_their_variables_are_settings_and_their_secrets_are_named_in_the_docs() -> None:
    named = [each for pod in pods().values() for container in pod for each in container.spec.get("env", [])]
    prefix = "SKYRL_TINKER_"
    ours = {each["name"].removeprefix(prefix).lower() for each in named if each["name"].startswith(prefix)}
    assert ours
    assert ours <= set(Settings.model_fields)
    secrets = [each["valueFrom"]["secretKeyRef"]["key"] for each in named if "secretKeyRef" in str(each)]
    assert secrets
    assert not [key for key in secrets if f"--from-literal={key}=" not in PAGE.read_text()]
