"""The wire between two hosts while a server trains and samples on both: with a tunnel, and without.

The first host has the server, the second a rank, a replica, an API process and the database. The tunnel is
that of docs/security.md; by its name, and by its default route, each host finds its address outside of it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from skyrl_tinker.store.cluster.signing_secrets import FILE
from tests.cookbook.support.kitchen import MODEL, Kitchen
from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train
from tests.support.capture import Captured, captured
from tests.support.cluster import GCS_PORT, on_host, start_ray
from tests.support.hosts import Host, hosts, why_not
from tests.support.postgres import postgres_server
from tests.support.serve import HEAL_S
from tests.support.tunnel import PORT, join_by_tunnel, look_outwards, why_no_tunnel
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TOKENS = random_tokens(30, seed=1)
GAP = 1e-3
DATABASE_PORT, ENGINE_PORT = 5432, 8100
BESIDE = {"arp", "icmp6", "elsewhere"}
"""Beside what hosts say to each other: they ask for neighbours on the wire itself."""


@pytest.fixture(autouse=True)
def _no_way_around_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NET", "Socket")


def test_all_traffic_between_hosts_is_in_the_tunnel() -> None:
    if reason := why_not() or why_no_tunnel():
        pytest.skip(reason)
    with hosts(2) as (first, second):
        for host in (first, second):
            look_outwards(host)
        join_by_tunnel(first, second)
        wire = trained_and_sampled(first, second)
    assert wire.sizes.keys() - BESIDE == {f"udp {PORT} > {PORT}"}
    assert wire.sizes[f"udp {PORT} > {PORT}"] > 1e6


def test_without_the_tunnel_each_part_of_it_is_seen() -> None:
    """The capture of the other test would have these: Ray, the database, the engine, ports chosen freely."""
    if reason := why_not():
        pytest.skip(reason)
    with hosts(2) as (first, second):
        wire = trained_and_sampled(first, second)
    assert {GCS_PORT, DATABASE_PORT, ENGINE_PORT} < wire.ports


def trained_and_sampled(head: Host, worker: Host) -> Captured:
    with captured(head, "eth0") as wire, server_on(head, worker) as urls:
        for url in urls:
            with Client.of(url, MODEL) as client:
                for training in (client.new_lora(), client.new_full()):
                    train(training, TOKENS)
                    expected = logprobs_of(training, TOKENS)
                    training.save_state("kept").result()
                    sampler = training.save_weights_and_get_sampling_client().result()
                    for seed in range(8):  # of other sessions, and so other replicas
                        asked = prompt(random_tokens(4, seed=seed) + TOKENS)
                        assert len(sampler.compute_logprobs(asked).result()) == 4 + len(TOKENS)
                    scored = sampler.compute_logprobs(prompt(TOKENS)).result()
                    assert np.abs(np.array(scored[1:]) - expected).max() < GAP
        for process in ("ray::RankProcess", "vllm.vllm_entry"):
            for host in (head, worker):
                pid = host.run("pgrep", "--full", "--oldest", process).strip()
                assert "NCCL_NET=Socket" in host.run("cat", f"/proc/{pid}/environ").split("\0")
    return wire


@contextmanager
def server_on(head: Host, worker: Host) -> Iterator[tuple[str, str]]:
    """Start the server and an API process on the other host; yields the URLs of both."""
    with ExitStack() as stack:
        shared = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="skyrl-tunnel-"))
        )
        (shared / "checkpoints").mkdir()
        worker.run("mount", "-t", "tmpfs", "tmpfs", shared / "checkpoints")  # its ranks send their files
        postgres = stack.enter_context(postgres_server(durable=True, host=worker))
        for host in (head, worker):
            start_ray(host, head, cpus=1)
        kitchen = Kitchen(shared / "kitchen")
        database = ("--database-url", postgres.url(), "--checkpoints", str(shared / "checkpoints"))
        model = ("--base-model", str(kitchen.model_directory), "--model-name", MODEL)
        over_ray = ("--ray-address", "auto", "--trainer-ranks", "2", "--replicas", "2")
        ways = ("--weight-transport", "gloo", "--engine-listen", f"{head.address}:{ENGINE_PORT}")
        options = (*database, *model, *over_ray, *ways)
        server = stack.enter_context(on_host(head, shared / "server", *options)).wait_ready()
        (shared / "api").mkdir()
        shutil.copy(server.home / FILE, shared / "api" / FILE)
        api = stack.enter_context(on_host(worker, shared / "api", *database, command="api"))
        wait_until(api.ready, HEAL_S)
        yield server.url, api.url
