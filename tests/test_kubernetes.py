"""Manifests of docker/kubernetes against the schemas of Kubernetes, our settings and the page on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from skyrl_tinker.config import Settings

ROOT = Path(__file__).parents[1] / "docker" / "kubernetes"
VERSION = "1.37"


def manifests() -> list[dict[str, Any]]:
    return [each for file in sorted(ROOT.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "template" in value:
            yield value["template"]
        for each in value.values():
            yield from pod_templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from pod_templates(each)


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


def test_their_variables_are_settings_and_their_secrets_are_named_in_the_docs() -> None:
    containers = [
        container
        for manifest in manifests()
        for template in pod_templates(manifest)
        for container in template["spec"]["containers"]
    ]
    variables = {each["name"] for container in containers for each in container.get("env", [])}
    ours = {
        name.removeprefix("SKYRL_TINKER_").lower() for name in variables if name.startswith("SKYRL_TINKER_")
    }
    assert ours
    assert ours <= set(Settings.model_fields)
    page = (ROOT.parents[1] / "docs" / "cluster.md").read_text()
    for container in containers:
        for each in container.get("env", []):
            if "valueFrom" in each:
                assert f"--from-literal={each['valueFrom']['secretKeyRef']['key']}=" in page
