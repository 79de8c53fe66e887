"""A base model that vLLM samples beside one that SGLang samples, with tools, on one server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, logprobs_of, metrics_of, prompt
from tests.e2e.support.policies import ATOL, TOKENS, step
from tests.e2e.test_tools import (  # noqa: F401 - kept here as with vLLM
    MODEL,
    STRICT,
    asked,
    caller,
    directory,
    oai,
    test_a_call_is_made_answered_and_its_answer_told,
    test_a_streamed_call_comes_in_pieces_that_make_it,
    test_an_answer_is_sent_back_as_the_sdk_dumps_it,
    test_the_prompt_is_counted_with_its_tools,
)
from tests.support.serve import Serve, serving
from tests.support.sglang_cpu.sglang_server import START_S, interpreter

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:  # noqa: F811
    home = tmp_path_factory.mktemp("engines") / "home"
    settings = (
        "vllm_args = { disable-log-stats = false }\n"
        f'[bases."{directory}"]\nroles = ["train", "sample"]\nmodel_name = "{MODEL}"\n'
        f'sampler_engine = "sglang"\nsampler_python = "{interpreter()}"\ntool_parser = "hermes"\n'
    )
    with serving(home, settings=settings, within_s=START_S) as served:
        yield served


@pytest.fixture(scope="module")
def service(server: Serve) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url) as made:
        yield made


@pytest.fixture(scope="module")
def by_vllm(server: Serve, service: tinker.ServiceClient) -> Client:
    return Client(server.url, service)


@pytest.fixture(scope="module")
def client(server: Serve, service: tinker.ServiceClient) -> Client:
    return Client(server.url, service, MODEL)


def test_each_samples_with_the_logprobs_of_its_own_trainer(by_vllm: Client, client: Client) -> None:
    made = []
    for base in (by_vllm, client):
        training = base.new_lora(seed=1)
        step(training)
        made.append((training.save_weights_and_get_sampling_client().result(), logprobs_of(training, TOKENS)))
    params = types.SamplingParams(max_tokens=8, temperature=0.7, stop=[])
    for sampler, expected in made:
        found = sampler.compute_logprobs(prompt(TOKENS)).result()
        np.testing.assert_allclose(found[1:], expected, atol=ATOL)
        answer = sampler.sample(prompt(TOKENS), 2, params).result()
        assert [len(sequence.tokens) for sequence in answer.sequences] == [8, 8]


def test_a_request_is_refused_by_the_engine_of_its_base_model(
    by_vllm: Client,
    client: Client,
    oai: openai.OpenAI,  # noqa: F811
) -> None:
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    first, again = (by_vllm.base_sampler().sample(prompt(TOKENS), 1, params).result() for _ in range(2))
    assert first.sequences[0].tokens == again.sequences[0].tokens
    told = r"seed is not supported by this base model's sampling engine, SGLang"
    with pytest.raises(tinker.BadRequestError, match=told):
        client.base_sampler().sample(prompt(TOKENS), 1, params).result()
    fields: Any = {"prompt": "2+2", "max_tokens": 2, "seed": 1}
    assert oai.completions.create(model=by_vllm.model, **fields).choices
    with pytest.raises(openai.BadRequestError, match=told):
        oai.completions.create(model=client.model, **fields)


def test_both_engines_are_told(server: Serve, by_vllm: Client, client: Client) -> None:
    listed = httpx.get(f"{server.url}/api/v1/get_server_capabilities").json()["supported_models"]
    told = {each["model_name"]: (each["sampler"]["engine"], each["sampler"]["seed"]) for each in listed}
    assert told == {by_vllm.model: ("vLLM", True), client.model: ("SGLang", False)}
    served = httpx.get(f"{server.url}/api/v1/console/now", timeout=30).json()["server"]["base_models"]
    assert [each["sampler"].split()[0] for each in served] == ["vLLM", "SGLang"]
    metrics = metrics_of(server.url).splitlines()
    for prefix, replica in (("vllm:", "0"), ("sglang:", "1-0")):
        of_engine = [line for line in metrics if line.startswith(prefix)]
        assert of_engine
        assert all(f'replica="{replica}"' in line for line in of_engine)


def test_who_wants_no_call_gets_text_and_shows_no_tools(oai: openai.OpenAI, caller: str) -> None:  # noqa: F811
    answer = asked(oai, caller, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens == asked(oai, caller, tools=openai.NOT_GIVEN).usage.prompt_tokens


def test_a_call_of_an_unknown_tool_is_told(oai: openai.OpenAI, caller: str) -> None:  # noqa: F811
    """Whoever rewards calls must see wrong ones."""
    other = {"type": "function", "function": STRICT["function"] | {"name": "abc", "strict": False}}
    message = asked(oai, caller, tools=[other]).choices[0].message
    assert message.tool_calls or message.content, message


def test_calls_that_need_a_grammar_are_refused(oai: openai.OpenAI, client: Client) -> None:  # noqa: F811
    fields: dict[str, Any]
    for lacked, fields in (
        ("parallel_tool_calls", {"parallel_tool_calls": False}),
        ("strict_tools", {"tools": [STRICT]}),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{lacked} is not supported by .*, SGLang"):
            asked(oai, client.model, **fields)
