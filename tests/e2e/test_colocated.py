"""`--placement colocated`: trainer and samplers take turns, and clients notice nothing but time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train
from tests.support.processes import vllm_servers
from tests.support.serve import Serve, serving

pytestmark = pytest.mark.long

TOKENS = random_tokens(40, seed=3)
LONG = 400
SYNCS = "weight_sync_seconds_count"


@contextmanager
def colocating(root: Path, settings: str = "") -> Iterator[Serve]:
    settings = f"phases = {{max_s = 0.6, min_s = 0.1}}\n{settings}"
    with serving(root / "home", "--placement", "colocated", settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with colocating(tmp_path_factory.mktemp("colocated")) as server:
        yield server


@pytest.fixture(scope="module")
def colocated(running: Serve) -> Iterator[Client]:
    with Client.of(running.url) as client:
        yield client


def metrics(server: Serve, prefix: str) -> dict[str, float]:
    """What the engine says at once."""
    socket = Directories(config.load(home=server.home)).engine_socket
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://engine") as engine:
        text = engine.get("/metrics", timeout=10).text
    lines = (line.split() for line in text.splitlines() if line.startswith(f"skyrl_tinker_{prefix}"))
    return {name.removeprefix("skyrl_tinker_"): float(value) for name, value in lines}


def turns(server: Serve) -> dict[str, float]:
    """How often each state was left, and after how many seconds in all."""
    return metrics(server, "turn")


def samplers_awake(server: Serve) -> bool:
    """No turn of the trainer has begun that has not ended."""
    counts = turns(server)
    return counts["turns_to_training"] == counts["turns_to_sampling"]


def generate(sampler: tinker.SamplingClient, tokens: int, seed: int = 5):  # type: ignore[no-untyped-def]
    params = types.SamplingParams(max_tokens=tokens, stop=[], seed=seed)
    return sampler.sample(prompt(TOKENS[:10]), 1, params, include_prompt_logprobs=True)


def test_two_tenants_train_sample_and_wait_for_their_saves(running: Serve, colocated: Client) -> None:
    tenants = [colocated.new_lora(seed=1), colocated.new_lora(seed=2, rank=4)]
    before = turns(running)
    for _ in range(2):
        samplers = [tenant.save_weights_and_get_sampling_client().result() for tenant in tenants]
        for tenant, sampler in zip(tenants, samplers, strict=True):
            rollout = generate(sampler, 16).result().sequences[0]
            scored = sampler.compute_logprobs(prompt(TOKENS)).result()
            np.testing.assert_allclose(scored[1:], logprobs_of(tenant, TOKENS), atol=1e-3)
            train(tenant, [*TOKENS[:10], *rollout.tokens])
    after = turns(running)
    for state in ("training", "sampling", "to_training", "to_sampling"):
        assert after[f"turns_{state}"] - before[f"turns_{state}"] > 1


def test_full_parameters_take_their_turns_too(colocated: Client) -> None:
    full = colocated.new_full()
    train(full, TOKENS, 1e-3)
    sampler = full.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(prompt(TOKENS)).result()
    np.testing.assert_allclose(scored[1:], logprobs_of(full, TOKENS), atol=1e-3)


def test_without_adapters_samplers_lose_their_weights_in_each_turn_of_the_trainer(tmp_path: Path) -> None:
    """Each sample after it waits for its own. (vLLM does not free them on a CPU.)"""
    with (
        colocating(tmp_path, "max_lora_rank = 0\n[parity]\nprobe_tokens = 0\n") as server,
        tinker.ServiceClient(base_url=server.url) as service,
    ):
        client = Client(server.url, service)
        with pytest.raises(tinker.RequestFailedError, match="max_lora_rank"):
            client.new_lora()
        full = client.new_full()
        expected, samplers = [logprobs_of(full, TOKENS)], [client.base_sampler()]
        for _ in range(2):
            train(full, TOKENS, 1e-3)
            samplers.append(full.save_weights_and_get_sampling_client().result())
            expected.append(logprobs_of(full, TOKENS))
        synced = metrics(server, SYNCS)[SYNCS]
        for number in (2, 2, 0, 0, 1, 1):
            np.testing.assert_allclose(logprobs_of(full, TOKENS), expected[-1], atol=1e-5)
            scored = samplers[number].compute_logprobs(prompt(TOKENS)).result()
            np.testing.assert_allclose(scored[1:], expected[number], atol=1e-3)
        assert metrics(server, SYNCS)[SYNCS] >= synced + 6


def test_long_generations_span_turns_and_come_out_the_same(
    running: Serve, colocated: Client, client: Client
) -> None:
    """The same tokens with the same logprobs as where nothing ever stands still."""
    training = colocated.new_lora()
    before = turns(running)
    pending = [generate(colocated.base_sampler(), LONG, seed) for seed in range(8)]
    while not all(each.future().done() for each in pending):
        training.forward_backward([datum(TOKENS)], "cross_entropy").result()
    assert turns(running)["turns_sampling"] - before["turns_sampling"] > 1
    undisturbed = [generate(client.base_sampler(), LONG, seed) for seed in range(8)]
    for one, other in zip(pending, undisturbed, strict=True):
        found, expected = one.result(), other.result()
        np.testing.assert_allclose(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], atol=1e-4)
        assert found.sequences[0].tokens == expected.sequences[0].tokens
        np.testing.assert_allclose(found.sequences[0].logprobs, expected.sequences[0].logprobs, atol=1e-4)


def test_a_flood_of_samples_and_training_share_the_time(running: Serve, colocated: Client) -> None:
    training, sampler = colocated.new_lora(), colocated.base_sampler()
    over = threading.Event()
    sampled: list[int] = []

    def flood() -> None:
        while not over.is_set():
            pending = [generate(sampler, 50, seed) for seed in range(16)]
            sampled.extend(len(each.result().sequences[0].tokens) for each in pending)

    thread = threading.Thread(target=flood)
    thread.start()
    began, steps, before = time.monotonic(), 0, turns(running)
    while time.monotonic() - began < 4:
        train(training, TOKENS)
        steps += 1
    over.set()
    thread.join()
    after = turns(running)
    assert steps >= 3
    assert len(sampled) >= 16
    assert after["turns_training"] - before["turns_training"] > 1


def test_a_sampler_that_dies_asleep_is_replaced_and_its_requests_come_back(
    running: Serve, colocated: Client
) -> None:
    training, sampler = colocated.new_lora(), colocated.base_sampler()
    pending = generate(sampler, LONG)
    heavy = training.forward_backward([datum(random_tokens(500, seed=i)) for i in range(60)], "cross_entropy")
    while samplers_awake(running):
        time.sleep(0.02)
    vllm_servers(running.process.pid)[0].kill()
    heavy.result()
    train(training, TOKENS)
    assert len(pending.result().sequences[0].tokens) == LONG
