"""The commands of docker/kubernetes, as processes on hosts of their own, with a CPU and `tiny`.

A head, a worker and an API process. Not tried: Kubernetes and KubeRay themselves, images, users and policies.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import ray_environment
from tests.support.hosts import NETWORK, Host, Process, hosts, why_not
from tests.support.pods import ROOT, Container, pods, ray_start, start
from tests.support.postgres import postgres_server
from tests.support.processes import below, title
from tests.support.serve import HEAL_S, KINDS, READY_S, START_S
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
ON_A_CPU = {
    "SKYRL_TINKER_DEVICE": "cpu",
    "SKYRL_TINKER_BASE_MODEL": "tiny",
    "SKYRL_TINKER_CONTEXT_LENGTH": "4096",
    "SKYRL_TINKER_TRAINER_RANKS": "2",  # one for each host
    "SKYRL_TINKER_REPLICAS": "1",
}
SIZES = {"num_cpus": "1", "object_store_memory": str(100 << 20)}
GRACE_S = 30
PROBE_EVERY_S = 5  # each probe is a process
CLIENT = """
import tinker
from tests.e2e.support.client import Client, prompt, random_tokens, train
with tinker.ServiceClient() as service:
    training = Client("", service).new_lora()
    train(training, random_tokens(30, seed=1))
    sampler = training.save_weights_and_get_sampling_client().result()
    print(len(sampler.compute_logprobs(prompt(random_tokens(20, seed=2))).result()))
"""
PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"


@dataclass(frozen=True)
class Cluster:
    """`data`: the directory that all pods see."""

    data: Path
    server: Process
    api_url: str
    client: Host
    probed: tuple[tuple[Host, Container], ...]

    def use(self) -> int:
        """Train and sample through the API process with the first key; return the number of logprobs."""
        key = (self.data / "first-key").read_text().strip()
        variables = {"TINKER_BASE_URL": self.api_url, "TINKER_API_KEY": key, "PYTHONPATH": str(ROOT)}
        return int(self.client.run(sys.executable, "-c", CLIENT, env=variables, cwd=ROOT))

    def answers(self, host: Host, container: Container) -> bool:
        """Whether all probes succeed, asked from another host as a kubelet does."""
        for port, path in container.probes():
            try:
                url = f"http://{host.address}:{port}{path}"
                self.client.run(sys.executable, "-c", PROBE, url, stderr=subprocess.DEVNULL)
            except subprocess.CalledProcessError:
                return False
        return True

    def wait_answering(self, within_s: float) -> None:
        """Wait for each container's probes in turn."""
        for host, container in self.probed:
            wait_until(lambda h=host, c=container: self.answers(h, c), within_s, PROBE_EVERY_S)
            assert self.server.poll() is None

    def daemons(self) -> set[int]:
        """Ray's processes on the host of the server."""
        kinds = (KINDS["raylet"], KINDS["GCS"])
        return {each.pid for each in below(self.server.pid) if any(kind in title(each) for kind in kinds)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    running: list[Process] = []
    with ExitStack() as stack:
        stack.callback(lambda: [process.wait() for process in running])  # which end with their hosts
        head, worker, api, client = made = stack.enter_context(hosts(4))
        for host in made:  # by which Ray finds its own address
            host.run("ip", "route", "add", "default", "via", f"{NETWORK}.254")
        data = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="skyrl-pods-"))
        stack.callback(shutil.rmtree, data)
        database = stack.enter_context(postgres_server(durable=True, host=client))
        secrets = {"database-url": database.url(), "ray-token": ray_environment()["RAY_AUTH_TOKEN"]}

        def run(host: Host, container: Container, ray: str = "") -> Process:
            of_kuberay = {
                "KUBERAY_GEN_RAY_START_CMD": ray,
                "RAY_ADDRESS": f"{'127.0.0.1' if host is head else head.address}:6379",
            }
            variables = container.variables({**secrets, "status.podIP": host.address})
            ours = {name: value for name, value in ON_A_CPU.items() if name in variables}
            mounts = {"/data": data, "/home/tinker": Path(host.home)}
            process = start(
                container,
                host,
                {**ray_environment(), **variables, **ours, **(of_kuberay if ray else {})},
                {path: mounts[path] for path in container.mounts if path in mounts},
            )
            running.append(process)
            return process

        first_key, server = pods()["server"]
        (node,) = pods()["worker"]
        copied, answering = pods()["api"]
        assert run(head, first_key).wait() == 0
        api.run("mount", "--bind", "-o", "ro", data, data)
        served = run(head, server, ray_start("head", **SIZES))
        run(worker, node, ray_start("worker", address=f"{head.address}:6379", **SIZES))
        assert run(api, copied).wait(2 * START_S) == 0  # the server has begun to start
        run(api, answering)
        url = f"http://{api.address}:{answering.port('http')}"
        cluster = Cluster(data, served, url, client, ((head, server), (worker, node), (api, answering)))
        cluster.wait_answering(READY_S)
        yield cluster


def test_clients_train_and_sample_with_the_first_key(cluster: Cluster) -> None:
    assert (cluster.data / "first-key").stat().st_mode & 0o777 == 0o600
    assert cluster.use() == 20


def test_ray_outlives_the_engine(cluster: Cluster) -> None:
    daemons = cluster.daemons()
    assert len(daemons) == 2
    (engine,) = [each for each in below(cluster.server.pid) if KINDS["engine"] in title(each)]
    engine.kill()
    wait_until(lambda: not psutil.pid_exists(engine.pid), HEAL_S)
    cluster.wait_answering(READY_S)
    assert cluster.daemons() == daemons
    assert cluster.use() == 20


def test_the_pod_of_the_server_ends_in_time(cluster: Cluster) -> None:
    """The first process of its container is `serve`: with it the container ends, and Ray in it."""
    (first,) = psutil.Process(cluster.server.pid).children()
    assert "serve" in title(first)
    first.send_signal(signal.SIGTERM)
    assert cluster.server.wait(GRACE_S) == 0
