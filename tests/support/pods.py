"""Pods of docker/kubernetes, parsed from the manifests, and their containers as processes on hosts."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.hosts import Host, Process

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "docker" / "kubernetes"
MEMORY = "/dev/shm"
"""Mount of which each host has its own."""


@dataclass(frozen=True)
class Container:
    """Container of a pod: what it runs, with what variables and ports, and where its volumes are mounted."""

    spec: Mapping[str, Any]

    @property
    def command(self) -> list[str]:
        return [*self.spec["command"], *self.spec.get("args", [])]

    @property
    def mounts(self) -> list[str]:
        return [mount["mountPath"] for mount in self.spec["volumeMounts"]]

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return its variables; `given`: values of secrets by key, and of fields of the pod by path."""
        return {each["name"]: each.get("value") or _given(each, given) for each in self.spec.get("env", [])}

    def port(self, name_or_number: str | int) -> int:
        """Return the number of a port."""
        named = {each["name"]: each["containerPort"] for each in self.spec.get("ports", [])}
        return int(named.get(name_or_number, name_or_number))

    def probes(self) -> Iterator[tuple[int, str]]:
        """Yield port and path of each HTTP probe."""
        for kind in ("readinessProbe", "livenessProbe"):
            get = self.spec[kind]["httpGet"]
            yield self.port(get["port"]), get["path"]


def manifests() -> list[dict[str, Any]]:
    files = sorted(MANIFESTS.glob("*.yaml"))
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield what pods are made from, wherever a manifest has it."""
    if isinstance(value, dict):
        if "template" in value:
            yield value["template"]
        for each in value.values():
            yield from pod_templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from pod_templates(each)


def pods() -> dict[str, list[Container]]:
    """Return the containers of each pod in the order in which they start, by the name of its last one."""
    found = {}
    for template in pod_templates(manifests()):
        spec = template["spec"]
        containers = [Container(each) for each in (*spec.get("initContainers", ()), *spec["containers"])]
        found[containers[-1].spec["name"]] = containers
    return found


def ray_start(role: str, **sizes: str) -> str:
    """Return KUBERAY_GEN_RAY_START_CMD as KubeRay writes it, of a "head" or a "worker"."""
    (spec,) = [each["spec"] for each in manifests() if each["kind"] == "RayCluster"]
    group = spec["headGroupSpec"] if role == "head" else spec["workerGroupSpecs"][0]
    own = {"dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
    parameters = {**own, **group["rayStartParams"], **{name.replace("_", "-"): sizes[name] for name in sizes}}
    flags = " ".join(f"--{name}={value} " for name, value in parameters.items())
    return f"ulimit -n 65536; ray start {'--head ' if role == 'head' else ''}--block {flags}"


def start(
    container: Container, host: Host, variables: Mapping[str, str], mounts: Mapping[str, Path]
) -> Process:
    """Start a container as a process. `mounts`: a directory on the host for each path that is mounted."""
    command = container.command
    assert {*container.mounts} <= {*mounts, MEMORY}
    values = dict(variables)
    for path, directory in mounts.items():
        command = [part.replace(path, str(directory)) for part in command]
        values = {name: value.replace(path, str(directory)) for name, value in values.items()}
    values["PATH"] = f"{ROOT / 'docker'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return host.popen(*command, env={**values, "PYTHONPATH": str(ROOT)}, cwd=ROOT)


def _given(variable: Mapping[str, Any], given: Mapping[str, str]) -> str:
    ((kind, source),) = variable["valueFrom"].items()
    return given[source["key"] if kind == "secretKeyRef" else source["fieldPath"]]
