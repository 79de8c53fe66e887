"""Inflight clients when a sampler or the engine dies: never less than the last published weights."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker

from tests.e2e.support.client import Client, logprobs_of, prompt
from tests.e2e.support.policies import ATOL, TOKENS, policy, roll, scores, step
from tests.support.serve import CORE, HEAL_S, Serve
from tests.support.waiting import wait_until


@pytest.fixture
def client(server: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=server.url) as service:
        yield Client(server.url, service)


def publish(training: tinker.TrainingClient) -> tinker.SamplingClient:
    return training.save_weights_and_get_sampling_client(kind="inflight").result()


def kill(server: Serve, kind: str) -> None:
    """It may be on its way still: a server is ready to train before all of its samplers are back."""
    assert wait_until(lambda: server.find(kind) is not None, HEAL_S)
    victim = server.find(kind)
    assert victim is not None
    victim.kill()


@pytest.mark.parametrize("rank", [8, 0], ids=["lora", "full"])
def test_an_update_while_the_sampler_restarts_reaches_what_waited_for_it(
    server: Serve, client: Client, rank: int
) -> None:
    training = policy(client, rank=rank, steps=1)
    sampler = publish(training)
    rollout = roll(sampler, 200)
    kill(server, CORE)
    step(training)
    publish(training)
    (sequence,) = rollout.result().sequences
    np.testing.assert_allclose(sequence.logprobs, scores(training, sequence.tokens), atol=ATOL)
    assert len(sequence.tokens) == 200
    assert wait_until(server.ready, HEAL_S)


def test_after_a_restart_of_the_engine_clients_follow_the_last_published_version(
    server: Serve, client: Client
) -> None:
    models = [policy(client, rank=rank, steps=1) for rank in (8, 0)]
    samplers = [publish(training) for training in models]
    for training in models:
        step(training)
        publish(training)
    last = [logprobs_of(training, TOKENS) for training in models]
    kill(server, "engine")
    assert wait_until(lambda: not server.ready(), HEAL_S)
    assert wait_until(server.ready, HEAL_S)
    for sampler, expected in zip(samplers, last, strict=True):
        scored = sampler.compute_logprobs(prompt(TOKENS)).result()
        np.testing.assert_allclose(scored[1:], expected, atol=ATOL)
