"""A server that samples with a real SGLang, through the SDK."""

from collections.abc import Iterator
from contextlib import suppress

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types
from tokenizers import Tokenizer

from tests.e2e.support.client import Client, logprobs_of, prompt
from tests.e2e.support.policies import ATOL, TOKENS, step
from tests.e2e.test_full_parameter import (  # noqa: F401 - kept here as with vLLM
    snapshot,
    test_full_parameter_training_learns_and_syncs,
    test_named_full_parameter_weights_are_sampled_by_path,
    test_pinned_versions_base_and_adapters_stay_right_beside_each_other,
)
from tests.e2e.test_inflight import (  # noqa: F401 - likewise
    test_a_long_rollout_spans_an_update_of_its_policy,
    test_old_and_new_clients_see_the_newest_weights_and_pinned_ones_their_own,
)
from tests.support.processes import title
from tests.support.serve import Serve
from tests.support.sglang_cpu.sglang_server import interpreter, sampling

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    home = tmp_path_factory.mktemp("served") / "home"
    with sampling(home, SAMPLER_PYTHON=str(interpreter())) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    with tinker.ServiceClient(base_url=server.url) as service:
        yield Client(server.url, service)


def test_each_snapshot_of_an_adapter_is_sampled_with_the_trainers_logprobs(client: Client) -> None:
    training = client.new_lora(rank=8, seed=1)
    made = []
    for _ in range(2):
        step(training)
        sampler = training.save_weights_and_get_sampling_client().result()
        made.append((sampler, logprobs_of(training, TOKENS)))
    for sampler, expected in made:
        found = sampler.compute_logprobs(prompt(TOKENS)).result()
        np.testing.assert_allclose(found[1:], expected, atol=ATOL)
    params = types.SamplingParams(max_tokens=8, temperature=0.7, stop=[])
    answer = made[1][0].sample(prompt(TOKENS), 3, params).result()
    for sequence in answer.sequences:
        assert (len(sequence.tokens), len(sequence.logprobs)) == (8, 8)
        scored = made[1][0].compute_logprobs(prompt([*TOKENS, *sequence.tokens])).result()
        np.testing.assert_allclose(sequence.logprobs, scored[len(TOKENS) :], atol=ATOL)


def test_texts_and_tokens_end_samples(server: Serve, client: Client) -> None:
    sampler = client.base_sampler()
    tokenizer = Tokenizer.from_file(str(server.home / "models" / "tiny" / "tokenizer.json"))
    greedy = types.SamplingParams(max_tokens=24, temperature=0.0, stop=[])
    whole = sampler.sample(prompt(TOKENS), 1, greedy).result().sequences[0].tokens
    stop, text = next((each, text) for each in whole if (text := tokenizer.decode([each])).isascii() and text)
    for given in ([stop], [text]):
        params = greedy.model_copy(update={"stop": given})
        (sequence,) = sampler.sample(prompt(TOKENS), 1, params).result().sequences
        assert sequence.stop_reason == "stop"
        assert sequence.tokens == whole[: len(sequence.tokens)]
        assert len(sequence.tokens) <= whole.index(stop) + 1


def test_what_it_lacks_is_refused_by_name(client: Client) -> None:
    sampler = client.base_sampler()
    body = {"model": client.model, "prompt": "a"}
    completion = httpx.post(f"{client.url}/oai/api/v1/completions", json=body, timeout=60)
    assert (completion.status_code, "openai_routes is not" in completion.text) == (400, True)
    with pytest.raises(tinker.BadRequestError, match=r"seed is not supported by .* engine, SGLang"):
        sampler.sample(prompt(TOKENS), 1, types.SamplingParams(max_tokens=1, seed=1)).result()


def test_a_replica_that_died_comes_back_with_full_parameters_and_ends_its_samples(
    server: Serve, client: Client
) -> None:
    training = client.new_full()
    step(training)
    sampler, expected = snapshot(training)
    params = types.SamplingParams(max_tokens=400, stop=[])
    running = sampler.sample(prompt(TOKENS[:8]), 4, params)
    for process in [each for each in server.tree() if "sglang" in title(each).lower()]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert [len(sequence.tokens) for sequence in running.result().sequences] == [400] * 4
    found = sampler.compute_logprobs(prompt(TOKENS)).result()
    np.testing.assert_allclose(found[1:], expected, atol=ATOL)
