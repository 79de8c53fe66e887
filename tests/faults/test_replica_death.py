"""Sampling on two replicas goes on when one of them, or the router before them, is killed."""

import re
from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import psutil
import pytest
import tinker
from tinker import types

from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from tests.e2e.support.client import Client, prompt, random_tokens, train
from tests.e2e.support.streams import assert_taken_over
from tests.support.processes import client_of, vllm_servers
from tests.support.serve import HEAL_S, Serve, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

PROMPT = random_tokens(20, seed=3)
LENGTH = 300
SAMPLES = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("replicas"), "--replicas", "2") as replicated:
        yield replicated


def adapters_of(vllm: psutil.Process) -> set[str]:
    with client_of(vllm) as http:
        return {model["id"] for model in http.get("/v1/models").json()["data"] if model["parent"]}


def detail(server: Serve) -> str:
    return str(httpx.get(f"{server.url}/readyz").json()["detail"])


def sample_many(server: Serve, sampler: tinker.SamplingClient) -> list[Future[types.SampleResponse]]:
    """Of different prompts, so that they are spread over the replicas; returns when these have them all."""
    pending = [
        sampler.sample(
            prompt([*PROMPT, index]),
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=LENGTH, stop=[], seed=index),
        )
        for index in range(SAMPLES)
    ]
    wait_until(lambda: samples_in_flight(server) > 0)
    return pending


def samples_in_flight(server: Serve) -> float:
    metrics = httpx.get(f"{server.url}/metrics").text
    return float(re.search(r"^\S*samples_in_flight\S* (\S+)$", metrics, re.M)[1])  # type: ignore[index]


def assert_right(sampler: tinker.SamplingClient, answers: list[types.SampleResponse]) -> None:
    """Tokens and logprobs belong together and to their own prompts."""
    scored = [
        sampler.compute_logprobs(prompt([*PROMPT, index, *answer.sequences[0].tokens]))
        for index, answer in enumerate(answers)
    ]
    for answer, score in zip(answers, scored, strict=True):
        (sequence,) = answer.sequences
        assert len(sequence.tokens) == LENGTH
        assert score.result(HEAL_S)[len(PROMPT) + 1 :] == pytest.approx(sequence.logprobs, abs=1e-3)


def test_the_trace_names_the_replica_of_each_sample(server: Serve, client: Client) -> None:
    sampler = client.base_sampler()
    answers = [each.result(HEAL_S) for each in sample_many(server, sampler)]
    events = httpx.get(f"{server.url}/api/v1/console/trace").json()["traceEvents"]
    named = [each["args"]["replicas"] for each in events if (each["name"], each["ph"]) == ("run", "b")]
    assert {len(replicas) for replicas in named} == {1}
    assert len(named) == len(answers)
    urls = {str(client_of(each).base_url) for each in vllm_servers(server.process.pid)}
    assert {f"http://{replica}" for (replica,) in named} == urls


def test_no_sample_is_lost_when_a_replica_is_killed_and_it_comes_back_with_all_adapters(
    server: Serve, client: Client
) -> None:
    training = client.new_lora()
    train(training, PROMPT)
    before = training.save_weights_and_get_sampling_client().result()
    pending = sample_many(server, before)
    victim, survivor = vllm_servers(server.process.pid)
    victim.kill()
    assert_right(before, [each.result(HEAL_S) for each in pending])

    assert server.ready()
    train(training, PROMPT)
    meanwhile = training.save_weights_and_get_sampling_client().result()
    assert_right(meanwhile, [each.result(HEAL_S) for each in sample_many(server, meanwhile)])

    wait_until(lambda: detail(server) == "")
    (newcomer,) = [each for each in vllm_servers(server.process.pid) if each != survivor]
    assert adapters_of(newcomer) == adapters_of(survivor)
    assert len(adapters_of(newcomer)) == 2
    assert_right(meanwhile, [each.result(HEAL_S) for each in sample_many(server, meanwhile)])


def test_no_sample_is_lost_when_the_router_is_killed(server: Serve, client: Client) -> None:
    sampler = client.base_sampler()
    pending = sample_many(server, sampler)
    router = server.find("router")
    assert router is not None
    router.kill()
    assert_right(sampler, [each.result(HEAL_S) for each in pending])
    wait_until(lambda: server.find("router") not in (None, router))
    assert_right(sampler, [each.result(HEAL_S) for each in sample_many(server, sampler)])
    assert server.ready()


def test_a_stream_of_which_nothing_was_sent_goes_on_at_the_other_replica(server: Serve) -> None:
    """vLLM has answered 200 before it computes."""
    victim, _ = vllm_servers(server.process.pid)
    assert_taken_over(server, victim, VLLM)
    wait_until(lambda: detail(server) == "")


def test_both_replicas_killed_at_once_come_back_and_samples_wait(server: Serve, client: Client) -> None:
    sampler = client.base_sampler()
    pending = sample_many(server, sampler)
    for vllm in vllm_servers(server.process.pid):
        vllm.kill()
    wait_until(lambda: not server.ready())
    assert_right(sampler, [each.result(HEAL_S) for each in pending])
    assert server.ready()
