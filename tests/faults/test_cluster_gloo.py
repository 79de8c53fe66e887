"""A Ray cluster of two hosts, each with its own network and memory: ranks and replicas on both."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train
from tests.faults.test_engine_death import rounds
from tests.support.cluster import HostServer, cluster_server, start_ray
from tests.support.hosts import Host, hosts, why_not
from tests.support.serve import HEAL_S, wait_until

pytestmark = pytest.mark.timeout(900)
TOKENS = random_tokens(30, seed=1)
GAP = 1e-3


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Host, ...]]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(machines: tuple[Host, ...]) -> Iterator[HostServer]:
    """A home on storage that the hosts share; the third host is not in the cluster yet."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="skyrl-cluster-") as shared:
        options = ("--trainer-ranks", "2", "--replicas", "2", "--config", "/var/tmp/gloo.toml")
        with cluster_server(machines[:2], Path(shared) / "home", *options) as server:
            yield server


@pytest.fixture
def client(cluster: HostServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=cluster.url) as service:
        yield Client(cluster.url, service)


def test_each_host_has_a_rank_and_a_replica(cluster: HostServer, machines: tuple[Host, ...]) -> None:
    for host in machines[:2]:
        titles = host.run("ps", "-eo", "args")
        assert titles.count("ray::RankProcess") == 1
        assert titles.count("ray::VllmServer") == 1


def test_adapters_and_full_weights_reach_the_samplers_of_both_hosts(
    cluster: HostServer, client: Client, machines: tuple[Host, ...]
) -> None:
    """Whatever host answers, its logprobs are the trainer's."""
    for training in (client.new_lora(), client.new_full()):
        for _ in range(2):
            train(training, TOKENS)
            expected = logprobs_of(training, TOKENS)
            sampler = training.save_weights_and_get_sampling_client().result()
            answers = [
                sampler.compute_logprobs(prompt(random_tokens(4, seed=seed) + TOKENS)) for seed in range(8)
            ]
            assert all(len(answer.result()) == 4 + len(TOKENS) for answer in answers)
            scored = sampler.compute_logprobs(prompt(TOKENS)).result()
            assert np.abs(np.array(scored[1:]) - expected).max() < GAP
    now = httpx.get(f"{cluster.url}/api/v1/console/now", timeout=30).json()
    hosts_of = {replica["address"].split("//")[1].split(":")[0] for replica in now["replicas"]}
    assert hosts_of == {host.address for host in machines[:2]}


def test_training_goes_on_when_a_host_is_lost(
    cluster: HostServer, client: Client, machines: tuple[Host, ...]
) -> None:
    """The server says what it waits for; another host joins, and all comes back to 1e-5."""
    head, worker, other = machines
    expected = rounds([client.new_lora(), client.new_full()], 4)
    models = [client.new_lora(), client.new_full()]
    before = rounds(models, 2)
    sampler = models[0].save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=60, seed=5, temperature=0.0, stop=[])
    tokens = [sampler.sample(prompt(TOKENS[:8]), 1, params).result().sequences[0].tokens]

    worker.kill()
    pending = [sampler.sample(prompt(TOKENS[:8]), 1, params) for _ in range(8)]
    assert [each.result(HEAL_S).sequences[0].tokens for each in pending] == tokens * 8
    assert wait_until(lambda: "no room for 2 trainer ranks" in str(cluster.state()), HEAL_S), cluster.state()
    start_ray(other, head, cpus=1)
    assert wait_until(cluster.ready, HEAL_S), cluster.state()
    after = rounds(models, 2, first=2)
    for found, wanted in zip([*before, *after], expected, strict=True):
        np.testing.assert_allclose(np.array(found, dtype=float), np.array(wanted, dtype=float), atol=1e-5)
