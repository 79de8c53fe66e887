"""A server that samples with a real SGLang, through the SDK."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker import types
from tokenizers import Tokenizer

from skyrl_tinker.inference.constants import TOKEN
from tests.e2e.support.client import Client, logprobs_of, metrics_of, prompt, random_tokens
from tests.e2e.support.policies import ATOL, TOKENS, step
from tests.e2e.test_examples import (  # noqa: F401 - kept here as with vLLM
    test_openai_client_streams_text_and_samples_saved_weights,
)
from tests.e2e.test_full_parameter import (  # noqa: F401 - likewise
    snapshot,
    test_full_parameter_training_learns_and_syncs,
    test_named_full_parameter_weights_are_sampled_by_path,
    test_pinned_versions_base_and_adapters_stay_right_beside_each_other,
)
from tests.e2e.test_inflight import (  # noqa: F401 - likewise
    test_a_long_rollout_spans_an_update_of_its_policy,
    test_old_and_new_clients_see_the_newest_weights_and_pinned_ones_their_own,
)
from tests.e2e.test_openai import (  # noqa: F401 - likewise
    CHAT,
    PROMPT,
    asynchronous,
    oai,
    test_a_chat_completion,
    test_a_developer_speaks_as_the_system,
    test_a_dialogue_goes_on_after_an_answer_without_text,
    test_a_streamed_chat_says_the_same_as_a_whole_one,
    test_an_answer_fits_its_schema_for_any_weights,
    test_an_answer_is_an_object_and_a_wrong_schema_is_refused,
    test_an_unknown_model_is_not_found,
    test_base_models_are_listed,
    test_logprobs_true_lists_the_sampled_tokens_of_a_completion,
    test_several_prompts_and_choices_come_in_order,
    test_sixteen_tokens_are_the_default_of_a_completion,
    test_token_ids_and_texts_stop_a_completion_and_are_not_in_its_text,
    test_top_k_1_is_greedy_in_both_routes,
    test_twenty_at_once_streamed_and_not,
    test_usage_comes_only_when_asked_for,
    test_what_asks_for_nothing_is_accepted_from_the_client,
    test_what_came_of_a_stream_that_its_client_left_is_on_the_bill,
    test_what_is_wrong_is_a_bad_request_that_says_so,
    test_whole_and_streamed_answers_are_on_the_bill,
    trained,
)
from tests.support.processes import client_of, command, title
from tests.support.serve import Serve
from tests.support.sglang_cpu.sglang_server import interpreter, sampling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

SAMPLE = Path(__file__).parents[2] / "scripts" / "bench" / "sample.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    home = tmp_path_factory.mktemp("served") / "home"
    with sampling(home, SAMPLER_PYTHON=str(interpreter())) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    with Client.of(server.url) as client:
        yield client


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


def test_a_path_is_completed_as_the_trainer_left_it(
    oai: openai.OpenAI,  # noqa: F811
    trained: tuple[str, np.ndarray],  # noqa: F811
) -> None:
    path, expected = trained
    for listed in (0, 2):
        answer = oai.completions.create(model=path, prompt=PROMPT, max_tokens=1, echo=True, logprobs=listed)
        (choice,) = answer.choices
        assert answer.model == path
        assert choice.logprobs is not None
        scored = choice.logprobs.token_logprobs
        assert scored is not None
        assert scored[0] is None
        np.testing.assert_allclose(np.asarray(scored[1:-1], float), expected, atol=ATOL)
        tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
        assert tokens is not None
        assert offsets == [sum(map(len, tokens[:index])) for index in range(len(tokens))]


def test_a_streamed_completion_says_the_same_as_a_whole_one(
    oai: openai.OpenAI,  # noqa: F811
    trained: tuple[str, np.ndarray],  # noqa: F811
) -> None:
    asked: Any = {"model": trained[0], "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    (whole,) = oai.completions.create(**asked).choices
    streamed = [chunk for chunk in oai.completions.create(**asked, stream=True) if chunk.choices]
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.text
    assert len({chunk.id for chunk in streamed}) == 1
    assert streamed[-1].choices[0].finish_reason == whole.finish_reason
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert whole.logprobs is not None
    for field in ("tokens", "text_offset"):
        assert [*chain(*(getattr(part, field) for part in parts))] == getattr(whole.logprobs, field)


def test_a_chat_lists_the_likeliest_tokens_and_not_the_sampled_one(
    oai: openai.OpenAI,  # noqa: F811
    client: Client,
) -> None:
    asked: Any = {"model": client.model, "messages": CHAT, "n": 4, "max_tokens": 16}
    answer = oai.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    logprobs = [choice.logprobs for choice in answer.choices]
    rows = [row for each in logprobs if each is not None for row in each.content or ()]
    for row in rows:
        first, second = (likely.logprob for likely in row.top_logprobs)
        assert first >= second
        assert first >= row.logprob - ATOL
    assert any(row.token not in [likely.token for likely in row.top_logprobs] for row in rows)


def test_every_end_of_text_token_ends_a_completion(oai: openai.OpenAI, client: Client) -> None:  # noqa: F811
    """An untrained model takes each of the two about once in 512 tokens."""
    ends: set[Any] = set()
    while len(ends) < 2:
        answer = oai.completions.create(model=client.model, prompt=PROMPT, n=16, max_tokens=500)
        stopped = [choice for choice in answer.choices if choice.finish_reason == "stop"]
        ends |= {(choice.model_extra or {})["stop_reason"] for choice in stopped}
    assert all(isinstance(each, int) for each in ends)


def test_what_was_cached_of_a_prompt_is_in_the_usage(oai: openai.OpenAI, client: Client) -> None:  # noqa: F811
    asked: Any = {"model": client.model, "prompt": random_tokens(40, seed=5), "max_tokens": 1}
    cached = []
    for _ in range(2):
        usage = oai.completions.create(**asked).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 39]


async def test_a_client_that_leaves_leaves_nothing_running(client: Client) -> None:
    async with asynchronous(client) as oai:  # noqa: F811
        asked: Any = {"model": client.model, "messages": CHAT, "n": 4, "max_tokens": 3000}
        stream = await oai.chat.completions.create(**asked, stream=True)
        wait_until(lambda: running(client) > 0, 120)
        await stream.close()
        with pytest.raises(openai.APITimeoutError):
            await oai.chat.completions.create(**asked, timeout=httpx.Timeout(30, read=0.5))
    wait_until(lambda: running(client) == 0, 120)


def running(client: Client) -> float:
    families = text_string_to_metric_families(metrics_of(client.url))
    samples = [sample for family in families for sample in family.samples]
    return sum(each.value for each in samples if each.name == "sglang:num_running_reqs")


@pytest.mark.parametrize(
    ("chat", "fields", "param"),
    [
        (False, {"seed": 1}, "seed"),
        (False, {"max_tokens": 0, "echo": True}, "max_tokens"),
        (False, {"extra_body": {"add_special_tokens": False}}, "add_special_tokens"),
        (False, {"temperature": 1e-7}, "temperature"),
        (True, {"stream": True, "logprobs": True}, "logprobs"),
        (True, {"stop": [f"{number}." for number in range(33)]}, "stop"),
        (True, {"extra_body": {"separate_reasoning": True}}, "separate_reasoning"),
        (True, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_its_routes_lack_is_refused_by_name(
    oai: openai.OpenAI,  # noqa: F811
    client: Client,
    chat: bool,
    fields: dict[str, Any],
    param: str,
) -> None:
    route: Any = oai.chat.completions if chat else oai.completions
    asked = {"messages": CHAT} if chat else {"prompt": PROMPT}
    with pytest.raises(openai.BadRequestError, match=param) as refused:
        route.create(model=client.model, **asked, **fields)
    assert refused.value.param == param


def test_what_it_lacks_is_refused_by_name(client: Client) -> None:
    sampler = client.base_sampler()
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


def test_the_benchmark_of_samples_compares_with_the_bare_server_and_ends(
    server: Serve, client: Client
) -> None:
    entries = (each for each in server.tree() if "sglang_entry.py" in title(each))
    bare = next(each for each in entries if "--port" in command(each))
    with client_of(bare) as http:
        url = str(http.base_url)
    urls = ["--base-url", server.url, "--sampler-url", url.rstrip("/")]
    short = ["--engine", "sglang", "--base-model", client.model, "--seconds", "1", "--tokens", "1"]
    environment = {**os.environ, TOKEN: bare.environ()[TOKEN]}
    run = [sys.executable, str(SAMPLE), *urls, *short]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert all(summary[f"ratio_x{count}"] > 0 for count in (1, 8, 64, 512))
    assert summary["publish_full_ms"] > 0
