"""Several real SGLang replicas, through the SDK: killed under load, they lose nothing and come back."""

from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families

from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from tests.e2e.support.client import Array, Client, logprobs_of, metrics_of, prompt
from tests.e2e.support.policies import ATOL, TOKENS, roll, step
from tests.e2e.support.streams import assert_taken_over
from tests.support.processes import below, command, title
from tests.support.serve import Serve
from tests.support.sglang_cpu.sglang_server import START_S, interpreter, sampling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

REPLICAS = 2
PROMPTS = [[first, *TOKENS[:8]] for first in range(3, 19)]
SCHEDULER, SERVER = "sglang::scheduler", "sglang_entry.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    home = tmp_path_factory.mktemp("served") / "home"
    with sampling(home, SAMPLER_PYTHON=str(interpreter()), REPLICAS=str(REPLICAS)) as server:
        yield server


@pytest.fixture(scope="module")
def samplers(server: Serve) -> Iterator[dict[tinker.SamplingClient, Array]]:
    """Adapters with two snapshots each, and the trainer's logprobs of TOKENS when each was made."""
    with Client.of(server.url) as client:
        made: dict[tinker.SamplingClient, Array] = {}
        for seed, rank in enumerate((8, 16)):
            training = client.new_lora(rank=rank, seed=seed)
            for _ in range(2):
                step(training)
                made[training.save_weights_and_get_sampling_client().result()] = logprobs_of(training, TOKENS)
        yield made


def processes(server: Serve, name: str) -> set[int]:
    return {each.pid for each in below(server.process.pid) if name in title(each)}


def prompt_tokens(server: Serve) -> Counter[str]:
    """Those that each replica says to have had; none where it does not answer within a second."""
    tokens: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics_of(server.url)):
        for sample in family.samples:
            if sample.name == "sglang:prompt_tokens_total":
                tokens[sample.labels["replica"]] += int(sample.value)
    return tokens


def assert_each_its_own(samplers: dict[tinker.SamplingClient, Array]) -> None:
    pending = [(sampler, sampler.compute_logprobs(prompt(TOKENS))) for sampler in samplers]
    for sampler, answer in pending:
        np.testing.assert_allclose(answer.result()[1:], samplers[sampler], atol=ATOL)


def published(server: Serve, rank: int) -> tuple[str, list[Array]]:
    """Train; return the path of the weights, and the trainer's logprobs of PROMPTS."""
    with Client.of(server.url) as client:
        training = client.new_lora(rank=rank, seed=3)
        step(training)
        path = training.save_weights_for_sampler("oai").result().path
        return path, [logprobs_of(training, tokens) for tokens in PROMPTS]


def assert_on_every_replica(server: Serve, path: str, expected: list[Array]) -> None:
    """By the router, which chooses by the prompt, once all replicas are there."""
    wait_until(lambda: httpx.get(f"{server.url}/readyz").json()["detail"] == "", START_S)
    before = prompt_tokens(server)
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key="any", max_retries=0) as oai:
        for tokens, scores in zip(PROMPTS, expected, strict=True):
            asked = oai.completions.create(model=path, prompt=tokens, max_tokens=1, echo=True, logprobs=0)
            assert asked.choices[0].logprobs is not None
            found = asked.choices[0].logprobs.token_logprobs or []
            np.testing.assert_allclose(np.asarray(found[1:-1], float), scores, atol=ATOL)
    wait_until(lambda: all(prompt_tokens(server)[replica] > before[replica] for replica in "01"), 120)


def test_every_replica_samples_every_adapter(
    server: Serve, samplers: dict[tinker.SamplingClient, Array]
) -> None:
    assert len(processes(server, SCHEDULER)) == REPLICAS
    assert_each_its_own(samplers)


def test_openai_requests_reach_the_adapter_on_every_replica(server: Serve) -> None:
    path, expected = published(server, 8)
    assert_on_every_replica(server, path, expected)


def test_its_own_metrics_come_with_the_number_of_their_replica(
    server: Serve, samplers: dict[tinker.SamplingClient, Array]
) -> None:
    families = text_string_to_metric_families(metrics_of(server.url))
    own = [sample for family in families if family.name.startswith("sglang:") for sample in family.samples]
    assert {sample.labels["replica"] for sample in own} == {"0", "1"}
    assert sum(prompt_tokens(server).values()) > 0


def test_a_stream_of_which_nothing_was_sent_goes_on_at_the_other_replica(server: Serve) -> None:
    named = (each for each in below(server.process.pid) if SERVER in title(each))
    victim = next(each for each in named if "--port" in command(each))
    assert_taken_over(server, victim, SGLANG)
    wait_until(lambda: httpx.get(f"{server.url}/readyz").json()["detail"] == "", START_S)


@pytest.mark.parametrize("name", [SCHEDULER, SERVER])
def test_a_replica_that_is_killed_under_load_loses_nothing_and_comes_back(
    server: Serve, samplers: dict[tinker.SamplingClient, Array], name: str
) -> None:
    before = processes(server, name)
    rollouts = [roll(sampler, 200, samples=2) for sampler in samplers]
    victim = next(each for each in below(server.process.pid) if each.pid in before and name in title(each))
    victim.kill()
    for rollout in rollouts:
        assert [len(sequence.tokens) for sequence in rollout.result().sequences] == [200, 200]
    wait_until(lambda: len(processes(server, SCHEDULER) - {victim.pid}) == REPLICAS, START_S)
    assert_each_its_own(samplers)


def test_full_weights_are_on_every_replica_and_on_one_that_comes_back(server: Serve) -> None:
    path, expected = published(server, 0)
    assert_on_every_replica(server, path, expected)
    before = processes(server, SCHEDULER)
    victim = next(each for each in below(server.process.pid) if each.pid in before)
    victim.kill()
    wait_until(lambda: len(processes(server, SCHEDULER) - {victim.pid}) == REPLICAS, START_S)
    assert_on_every_replica(server, path, expected)
