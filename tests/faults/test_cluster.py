"""A server on several hosts, each with its own network, processes and memory.

The first host has the head of a Ray cluster and the engine, the second further ranks and replicas. A third
one answers clients, joins the Ray cluster when the second is lost, and stands by for the first. A fourth has
the database. Tests are in this order, on one server.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from tinker import types

from skyrl_tinker.store.cluster.signing_secrets import FILE
from tests.cookbook.support.kitchen import MODEL, Kitchen
from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train
from tests.faults.test_engine_death import rounds
from tests.support.cluster import HostServer, on_host, start_ray
from tests.support.hosts import Host, hosts, why_not
from tests.support.postgres import postgres_server
from tests.support.serve import HEAL_S
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TOKENS = random_tokens(30, seed=1)
GAP = 1e-3
TAKEN_S = 120
Rounds = list[list[tuple[float, float]]]


@dataclass(frozen=True)
class Cluster:
    head: Host
    worker: Host
    third: Host
    server: HostServer
    api: HostServer
    kitchen: Kitchen
    shared: Path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Checkpoints and snapshots are on storage that all hosts share but the second; homes are their own."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        head, worker, third, database = stack.enter_context(hosts(4))
        shared = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="skyrl-cluster-"))
        )
        postgres = stack.enter_context(postgres_server(durable=True, host=database))
        for each in ("checkpoints", "snapshots"):
            (shared / each).mkdir()
            worker.run("mount", "-t", "tmpfs", "tmpfs", shared / each)
        for host in (head, worker):
            start_ray(host, head, cpus=1)
        kitchen = Kitchen(shared / "kitchen")
        options = ["--standby", "--database-url", postgres.url()]
        options += [
            part for each in ("checkpoints", "snapshots") for part in (f"--{each}", str(shared / each))
        ]
        options += ["--base-model", str(kitchen.model_directory), "--model-name", MODEL]
        over_ray = ("--ray-address", "auto", "--trainer-ranks", "2", "--replicas", "2")
        listening = ("--engine-listen", f"{head.address}:8100")
        server = stack.enter_context(on_host(head, shared / "head", *options, *listening, *over_ray))
        server.wait_ready()
        (shared / "api").mkdir()
        (shared / "standby").mkdir()
        for home in ("api", "standby"):
            shutil.copy(server.home / FILE, shared / home / FILE)
        api = stack.enter_context(on_host(third, shared / "api", *options[1:5], command="api"))
        wait_until(api.ready, HEAL_S)
        listening = ("--engine-listen", f"{third.address}:8100", "--port", "8001")
        stack.enter_context(on_host(third, shared / "standby", *options, *listening))
        kitchen.url = api.url
        yield Cluster(head, worker, third, server, api, kitchen, shared)


def test_each_host_has_a_rank_and_a_replica(cluster: Cluster) -> None:
    for host in (cluster.head, cluster.worker):
        titles = host.run("ps", "-eo", "args")
        assert titles.count("ray::RankProcess") == 1
        assert titles.count("ray::SamplerServer") == 1


def test_adapters_and_full_weights_reach_the_samplers_of_both_hosts(cluster: Cluster) -> None:
    """Whatever host samples, and whatever host answers, logprobs are the trainer's."""
    with Client.of(cluster.server.url, MODEL) as near, Client.of(cluster.api.url, MODEL) as far:
        for training in (near.new_lora(), far.new_full()):
            for _ in range(2):
                train(training, TOKENS)
                expected = logprobs_of(training, TOKENS)
                sampler = training.save_weights_and_get_sampling_client().result()
                for seed in range(8):  # of other sessions, and so other replicas
                    asked = prompt(random_tokens(4, seed=seed) + TOKENS)
                    assert len(sampler.compute_logprobs(asked).result()) == 4 + len(TOKENS)
                scored = sampler.compute_logprobs(prompt(TOKENS)).result()
                assert np.abs(np.array(scored[1:]) - expected).max() < GAP
    now = httpx.get(f"{cluster.api.url}/api/v1/console/now", timeout=30).json()
    found = {each["host"]: (each["weights_by"], each["adapters_by"]) for each in now["replicas"]}
    assert found == {
        cluster.head.address: ("shared memory", "shared memory"),
        cluster.worker.address: ("pull", "pull"),
    }


def test_a_host_that_shares_no_directory_writes_and_reads_its_part_of_checkpoints(cluster: Cluster) -> None:
    with Client.of(cluster.server.url, MODEL) as client:
        for training in (client.new_lora(), client.new_full()):
            train(training, TOKENS)
            path = training.save_state("apart").result().path
            train(training, TOKENS)
            resumed = client.service.create_training_client_from_state_with_optimizer(path).result()
            train(resumed, TOKENS)
            np.testing.assert_allclose(logprobs_of(resumed, TOKENS), logprobs_of(training, TOKENS), atol=1e-5)
    log = (cluster.server.home / "logs" / "engine.log").read_text()
    assert log.count("is not shared: ranks of other hosts send and get its files") == 2
    places = (cluster.shared / "checkpoints", cluster.shared / "snapshots", "/tmp", "/dev/shm")
    find = ("find", *places, "-name", "*.safetensors")
    wait_until(lambda: not cluster.worker.run(*find), 60)


def test_the_cookbook_learns_on_both_hosts(cluster: Cluster) -> None:
    """sl_loop teaches an adapter, with which rl_loop goes on, through the host that answers clients."""
    settings = ("batch_size=8", "learning_rate=6e-3", "max_length=512", "save_every=0")
    taught = cluster.kitchen.cook("sl_loop", "taught", *settings)
    assert np.mean(taught.column("train_mean_nll")[-5:]) < 0.5 < 5 < taught.column("train_mean_nll")[0]
    cluster.kitchen.log("rl_loop", taught.checkpoints[-1] | {"batch": 0})
    sizes = ("group_size=8", "max_tokens=24", "batch_size=4", "learning_rate=5e-4", "max_steps=3")
    rewards = cluster.kitchen.cook("rl_loop", "rl_loop", *sizes).column("reward/total")
    assert len(rewards) == 3
    assert np.mean(rewards) > 0.05, "what was taught is sampled"


def test_training_goes_on_when_a_host_is_lost(cluster: Cluster) -> None:
    """The server says what it waits for; another host joins, and all comes back to 1e-5."""
    with Client.of(cluster.server.url, MODEL) as client:
        expected = rounds([client.new_lora(), client.new_full()], 4)
        models = [client.new_lora(), client.new_full()]
        before = rounds(models, 2)
        sampler = models[0].save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=60, temperature=0.0, stop=[])
        (wanted,) = sampler.sample(prompt(TOKENS[:8]), 1, params).result().sequences

        cluster.worker.kill()
        pending = [sampler.sample(prompt(TOKENS[:8]), 1, params) for _ in range(8)]
        assert [each.result(HEAL_S).sequences[0].tokens for each in pending] == [wanted.tokens] * 8
        wait_until(lambda: "no room for 2 trainer ranks" in str(cluster.server.state()), HEAL_S)
        start_ray(cluster.third, cluster.head, cpus=1)
        wait_until(cluster.server.ready, HEAL_S)
        assert_equal([*before, *rounds(models, 2, first=2)], expected)


def test_a_standby_goes_on_when_the_head_is_lost(cluster: Cluster) -> None:
    """It has a rank and a replica of its own, and what the two ranks before it trained."""
    with Client.of(cluster.api.url, MODEL) as client:
        expected = rounds([client.new_lora()], 4)
        models = [client.new_lora()]
        before = rounds(models, 2)
        kept = models[0].save_weights_for_sampler("kept").result().path
        cluster.head.kill()
        after = rounds(models, 2, first=2)
        wait_until(cluster.api.ready, TAKEN_S)
        assert_equal([*before, *after], expected)
        sampler = client.service.create_sampling_client(model_path=kept).result()
        assert len(sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)) == len(TOKENS)


def assert_equal(found: Rounds, expected: Rounds) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-5)
