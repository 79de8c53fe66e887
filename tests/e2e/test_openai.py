"""The unmodified `openai` client against our OpenAI-compatible routes."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.protocol.schemas.openai import OWNER_HEADER
from tests.e2e.support.client import Client, logprobs_of, metrics_of, prompt, random_tokens, train
from tests.support.serve import Serve
from tests.support.waiting import wait_until

PROMPT = random_tokens(12, seed=21)
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which letter?"}]


@pytest.fixture(scope="module")
def oai(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.url}/oai/api/v1", api_key="any", max_retries=0) as made:
        yield made


@contextlib.asynccontextmanager
async def asynchronous(client: Client) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{client.url}/oai/api/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module", params=["lora", "full"])
def trained(request: pytest.FixtureRequest, client: Client) -> tuple[str, np.ndarray]:
    """The path of sampler weights, and how the trainer scores PROMPT with them."""
    training = client.new_lora() if request.param == "lora" else client.new_full()
    train(training, PROMPT, 3e-2 if request.param == "lora" else 1e-3)
    path = training.save_weights_for_sampler("oai").result().path
    return path, logprobs_of(training, PROMPT)


def counted(client: Client, kind: str, outcome: str) -> float:
    text = metrics_of(client.url)
    name = f'skyrl_tinker_requests_total{{kind="{kind}",outcome="{outcome}"}} '
    return next((float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)), 0.0)


def test_base_models_are_listed(oai: openai.OpenAI, client: Client) -> None:
    assert client.model in [model.id for model in oai.models.list()]


def test_a_completion_of_text(oai: openai.OpenAI, client: Client) -> None:
    answer = oai.completions.create(model=client.model, prompt="What is", max_tokens=6, seed=3, user="me")
    assert answer.model == client.model
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    again = oai.completions.create(model=client.model, prompt="What is", max_tokens=6, seed=3)
    assert again.choices[0].text == answer.choices[0].text


def test_sixteen_tokens_are_the_default_of_a_completion(oai: openai.OpenAI, client: Client) -> None:
    answer = oai.completions.create(model=client.model, prompt=PROMPT, temperature=0)
    assert answer.usage is not None
    assert answer.choices[0].finish_reason == "stop" or answer.usage.completion_tokens == 16


def test_several_prompts_and_choices_come_in_order(oai: openai.OpenAI, client: Client) -> None:
    answer = oai.completions.create(model=client.model, prompt=["a", "b"], n=2, max_tokens=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]


def test_greedy_choices_are_equal_streamed_or_not(oai: openai.OpenAI, client: Client) -> None:
    asked: dict[str, Any] = {"model": client.model, "messages": CHAT, "max_tokens": 4, "temperature": 0}
    one = oai.chat.completions.create(**asked).choices[0].message.content
    whole = oai.chat.completions.create(**asked, n=3)
    assert [(each.index, each.message.content) for each in whole.choices] == [(0, one), (1, one), (2, one)]
    texts = ["", "", ""]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in oai.chat.completions.create(**asked, **options, n=3):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [one] * 3
    assert usage
    assert whole.usage
    assert usage.total_tokens == whole.usage.total_tokens


def test_a_path_is_sampled_as_the_trainer_left_it(
    oai: openai.OpenAI, trained: tuple[str, np.ndarray]
) -> None:
    path, expected = trained
    answer = oai.completions.create(model=path, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert answer.model == path
    assert answer.choices[0].logprobs is not None
    scored = answer.choices[0].logprobs.token_logprobs
    assert scored is not None
    assert scored[0] is None
    np.testing.assert_allclose(np.asarray(scored[1:], float), expected, atol=1e-3)


def test_a_path_is_a_model_for_its_owner_alone(
    client: Client, server: Serve, trained: tuple[str, np.ndarray]
) -> None:
    """The engine's own socket stands in for an API that has keys: it says who asks, clients cannot."""
    body = {"model": trained[0], "prompt": PROMPT, "max_tokens": 1}
    another = {OWNER_HEADER: "7"}
    url = "/oai/api/v1/completions"
    socket = Directories(config.load(home=server.home)).engine_socket
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://engine") as engine:
        assert engine.post(url, json=body).status_code == 200
        refused = engine.post(url, json=body, headers=another)
        unknown = engine.post(url, json=body | {"model": trained[0] + "x"})
    assert (refused.status_code, unknown.status_code) == (404, 404)
    assert refused.text.replace(trained[0], trained[0] + "x") == unknown.text
    assert httpx.post(f"{client.url}{url}", json=body, headers=another).status_code == 200


def test_every_end_of_text_token_ends_a_sequence(oai: openai.OpenAI, client: Client) -> None:
    """Until one of them comes up: an untrained model takes each about once in 512 tokens."""
    answer = oai.completions.create(model=client.model, prompt=PROMPT, n=16, max_tokens=2000, seed=0)
    reasons = {choice.finish_reason for choice in answer.choices}
    stops = {choice.model_extra["stop_reason"] for choice in answer.choices if choice.model_extra}
    assert "stop" in reasons
    assert len(stops - {None}) == 2, "one token only ends text"


def test_token_ids_and_texts_stop_a_completion_and_are_not_in_its_text(
    oai: openai.OpenAI, client: Client
) -> None:
    """With more texts than the four of OpenAI, one of which comes first when the token does not."""
    asked = types.SamplingParams(max_tokens=12, temperature=0, stop=[])
    tokens = client.base_sampler().sample(prompt(PROMPT), 1, asked).result().sequences[0].tokens
    stop = tokens[6]
    greedy: Any = {"model": client.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = oai.completions.create(**greedy, stop=[stop, 0])
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens.index(stop) + 1
    text = oai.completions.create(**greedy).choices[0].text
    assert text.startswith(choice.text)
    assert len(choice.text) < len(text)
    texts = [*(f"none of these {index}" for index in range(8)), text[3:5]]
    until = oai.completions.create(**greedy, stop=texts)
    assert until.choices[0].text == text[: text.index(text[3:5])]


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_a_special_token_stops_a_completion(
    oai: openai.OpenAI, client: Client, stream: bool
) -> None:
    special = 1
    asked = types.SamplingParams(max_tokens=60, seed=100)
    free = client.base_sampler().sample(prompt(PROMPT), 128, asked).result().sequences
    index, tokens = next((i, s.tokens) for i, s in enumerate(free) if special in s.tokens)
    fields: Any = {"model": client.model, "prompt": PROMPT, "max_tokens": 60, "seed": 100 + index}
    fields |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = oai.completions.create(**fields, stop="<|im_start|>", stream=stream)
    *_, end, last = answer if stream else (answer, answer)
    assert end.choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == tokens.index(special) + 1
    with pytest.raises(openai.BadRequestError, match="has the special token") as refused:
        oai.completions.create(**fields, stop=["<|im_start|>user"], stream=stream)
    assert refused.value.param == "stop"


def test_logprobs_true_lists_the_sampled_tokens_of_a_completion(oai: openai.OpenAI, client: Client) -> None:
    asked: Any = {"model": client.model, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    flagged = oai.completions.create(**asked, extra_body={"logprobs": True}).choices[0].logprobs
    assert flagged is not None
    assert flagged == oai.completions.create(**asked, logprobs=0).choices[0].logprobs
    assert len(flagged.token_logprobs or ()) == 5
    assert oai.completions.create(**asked, extra_body={"logprobs": False}).choices[0].logprobs is None


@pytest.mark.parametrize("temperature", [0.001, -0.1])
def test_a_temperature_is_refused_as_for_a_sample(
    oai: openai.OpenAI, client: Client, temperature: float
) -> None:
    """vLLM would sample at 0.01 instead of the first, and say nothing."""
    params = types.SamplingParams(max_tokens=1, temperature=temperature)
    with pytest.raises(tinker.BadRequestError, match=r"temperature: .*found") as refused:
        client.base_sampler().sample(prompt(PROMPT), 1, params).result()
    said = str(refused.value).partition("temperature: ")[2].rstrip("'}")
    asked: Any = {"model": client.model, "max_tokens": 1, "temperature": temperature}
    with pytest.raises(openai.BadRequestError, match="temperature") as completion:
        oai.completions.create(**asked, prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="temperature") as chat:
        oai.chat.completions.create(**asked, messages=CHAT)
    assert said in completion.value.message
    assert said in chat.value.message
    assert completion.value.param == chat.value.param == "temperature"


def test_a_seed_below_zero_is_that_of_a_sample(oai: openai.OpenAI, client: Client) -> None:
    asked: Any = {"model": client.model, "prompt": PROMPT, "max_tokens": 12, "seed": -1}
    first, second = oai.completions.create(**asked, n=2).choices
    same = oai.completions.create(**asked | {"seed": 2**63 - 1}).choices[0]
    assert (first.text, first.text == second.text) == (same.text, False)


def test_top_k_1_is_greedy_in_both_routes(oai: openai.OpenAI, client: Client) -> None:
    completion: Any = {"model": client.model, "prompt": PROMPT, "max_tokens": 12}
    chat: Any = {"model": client.model, "messages": CHAT, "max_tokens": 12}
    best: Any = {"top_k": 1}
    assert (
        oai.completions.create(**completion, extra_body=best).choices[0].text
        == oai.completions.create(**completion, temperature=0).choices[0].text
    )
    assert (
        oai.chat.completions.create(**chat, extra_body=best).choices[0].message.content
        == oai.chat.completions.create(**chat, temperature=0).choices[0].message.content
    )


def test_what_asks_for_nothing_is_accepted_from_the_client(oai: openai.OpenAI, client: Client) -> None:
    asked: Any = {"model": client.model, "messages": CHAT, "max_tokens": 8, "temperature": 0}
    plain = oai.chat.completions.create(**asked).choices[0].message.content
    padded = oai.chat.completions.create(
        **asked,
        store=False,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        metadata={"run": "1"},
        n=1,
        seed=None,
        user="me",
        service_tier="auto",
        response_format={"type": "text"},
        reasoning_effort="none",
        extra_body={
            "separate_reasoning": False,
            "chat_template_kwargs": {"enable_thinking": False},
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": True,
        },
    )
    assert padded.choices[0].message.content == plain


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"separate_reasoning": True}}, "separate_reasoning"),
        ({"store": True}, "store"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"stop": "", "max_tokens": 4}, "stop"),
    ],
)
def test_what_would_change_the_answer_and_is_not_done_is_refused_by_name(
    oai: openai.OpenAI, client: Client, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=field) as refused:
        oai.chat.completions.create(model=client.model, messages=CHAT, **fields)
    assert refused.value.param == field


COLOURS = ["red", "blue"]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": COLOURS}}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_fits_its_schema_for_any_weights(oai: openai.OpenAI, client: Client, stream: bool) -> None:
    asked: Any = {"model": client.model, "messages": CHAT, "response_format": SCHEMA, "stream": stream}
    for _ in range(3):
        answer = oai.chat.completions.create(**asked, max_tokens=40)
        if stream:
            chunks = list(answer)
            text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
            reason = next(each.choices[0].finish_reason for each in chunks[::-1] if each.choices)
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert (json.loads(text) in COLOURS, reason) == (True, "stop")


def test_an_answer_is_an_object_and_a_wrong_schema_is_refused(oai: openai.OpenAI, client: Client) -> None:
    asked: Any = {"model": client.model, "messages": CHAT, "max_tokens": 8}
    answer = oai.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.strip().startswith("{")
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError, match="response_format: the sampler makes no answer"):
        oai.chat.completions.create(**asked, response_format=wrong)
    assert oai.chat.completions.create(**asked).choices


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#"}]},
        {"type": "object", "patternProperties": {"(": {}}},
        {"type": "string", "pattern": "("},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    ],
)
def test_a_schema_that_no_answer_is_made_of_is_refused(
    oai: openai.OpenAI, client: Client, schema: Any
) -> None:
    """Not as a failure of the server, which clients try again."""
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: Any = {"model": client.model, "messages": CHAT, "max_tokens": 8}
    with pytest.raises(
        openai.BadRequestError, match="response_format: the sampler makes no answer"
    ) as refused:
        oai.chat.completions.create(**asked, response_format=wrong)
    assert refused.value.param == "response_format"


def test_a_chat_completion(oai: openai.OpenAI, client: Client) -> None:
    answer = oai.chat.completions.create(
        model=client.model, messages=CHAT, max_completion_tokens=5, n=2, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def prompt_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens)


def test_a_dialogue_goes_on_after_an_answer_without_text(oai: openai.OpenAI, client: Client) -> None:
    """As an answer cut within its reasoning is, when the client sends it back."""
    asked: Any = {"model": client.model, "max_tokens": 8, "temperature": 0}
    empty, null, absent = (
        oai.chat.completions.create(**asked, messages=[*CHAT, {"role": "assistant", **said}, CHAT[1]])
        for said in ({"content": ""}, {"content": None}, {})
    )
    assert empty.choices[0].message == null.choices[0].message == absent.choices[0].message
    assert prompt_tokens(empty) == prompt_tokens(null) == prompt_tokens(absent)


def test_a_developer_speaks_as_the_system(oai: openai.OpenAI, client: Client) -> None:
    asked: Any = {"model": client.model, "max_tokens": 8, "temperature": 0}
    system, developer = (
        oai.chat.completions.create(**asked, messages=[CHAT[0] | {"role": role}, CHAT[1]])
        for role in ("system", "developer")
    )
    assert system.choices[0].message == developer.choices[0].message
    assert prompt_tokens(system) == prompt_tokens(developer)


def test_a_streamed_chat_says_the_same_as_a_whole_one(oai: openai.OpenAI, client: Client) -> None:
    asked: dict[str, Any] = {"model": client.model, "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = oai.chat.completions.create(**asked)
    chunks = list(oai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {chunk.model for chunk in chunks} == {client.model}
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


def test_usage_comes_only_when_asked_for(oai: openai.OpenAI, trained: tuple[str, np.ndarray]) -> None:
    path, _ = trained
    chunks = list(oai.completions.create(model=path, prompt=PROMPT, max_tokens=4, stream=True))
    assert {chunk.model for chunk in chunks} == {path}
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 100_000}, r"12 prompt tokens \+ 100000 max_tokens > \d+"),
        ({"prompt": "a" * 5_000_000}, "prompt: 5000000 characters, expected at most 4194304 for 4096 tokens"),
        ({"prompt": [100_000]}, r"prompt\[0\] is 100000, expected a token id"),
        ({"n": 0}, "n: "),
        ({"best_of": 2}, "best_of: .*expected the value of n, found 2"),
        ({"extra_body": {"min_p": 0.5}}, "min_p is not supported"),
        ({"extra_body": {"stop": [5000]}}, r"stop\[0\] is 5000, expected a token id"),
        ({"model": "tinker://nobody:train:0/weights/x"}, "no weights for sampling"),
    ],
)
def test_what_is_wrong_is_a_bad_request_that_says_so(
    oai: openai.OpenAI, client: Client, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        oai.completions.create(**{"model": client.model, "prompt": PROMPT, **fields})


def test_tools_and_images_are_refused_by_name(oai: openai.OpenAI, client: Client) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        oai.chat.completions.create(model=client.model, messages=image)
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools") as refused:
        oai.chat.completions.create(model=client.model, messages=CHAT, tools=tools)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("model", ["no-such-model", "tinker://nobody:train:0/sampler_weights/x"])
def test_an_unknown_model_is_not_found(oai: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        oai.completions.create(model=model, prompt="a")
    assert refused.value.code == "model_not_found"


async def test_twenty_at_once_streamed_and_not(client: Client) -> None:
    async with asynchronous(client) as oai:

        async def streamed() -> int:
            chunks = await oai.completions.create(
                model=client.model, prompt=PROMPT, max_tokens=8, stream=True
            )
            return len([chunk async for chunk in chunks])

        async def whole() -> int:
            answer = await oai.completions.create(model=client.model, prompt=PROMPT, max_tokens=8)
            return len(answer.choices)

        lengths = await asyncio.gather(*(streamed() for _ in range(10)), *(whole() for _ in range(10)))
    assert min(lengths) >= 1


def test_whole_and_streamed_answers_are_on_the_bill(oai: openai.OpenAI, client: Client) -> None:
    asked: dict[str, Any] = {"model": client.model, "prompt": PROMPT, "max_tokens": 5}
    before = settled_bill(client)
    whole = oai.completions.create(**asked, n=3)
    for _ in oai.completions.create(**asked, stream=True):
        pass
    assert whole.usage is not None
    wait_until(lambda: (billed(client) - before)[0] == 2 * len(PROMPT), 60)
    prompts, sampled = billed(client) - before
    assert prompts == 2 * len(PROMPT)
    assert whole.usage.completion_tokens < sampled <= whole.usage.completion_tokens + 5


async def test_what_came_of_a_stream_that_its_client_left_is_on_the_bill(client: Client) -> None:
    tokens = 1000
    async with asynchronous(client) as oai:
        before = settled_bill(client)
        stream = await oai.completions.create(
            model=client.model, prompt=PROMPT, max_tokens=tokens, n=4, stream=True
        )
        chunks = aiter(stream)
        for _ in range(20):
            assert (await anext(chunks)).usage is None
        await stream.close()
    wait_until(lambda: (billed(client) - before)[0] == len(PROMPT), 60)
    assert 20 <= (billed(client) - before)[1] < 4 * tokens


def settled_bill(client: Client) -> np.ndarray:
    """What is billed once the requests of earlier tests are, also those that they left."""
    before = billed(client) - 1
    while (bill := billed(client)).tolist() != before.tolist():
        before = bill
        time.sleep(1)
    return bill


def billed(client: Client) -> np.ndarray:
    """Prompt and sampled tokens of OpenAI clients."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    query = {
        "starting_on": (now - timedelta(hours=2)).isoformat(),
        "ending_before": (now + timedelta(hours=2)).isoformat(),
    }
    answer = httpx.get(f"{client.url}/api/v1/billing/usage/events", params=query).raise_for_status().json()
    tokens = {"sampling_prefill": 0, "sampling_sample": 0}
    for event in answer["data"]:
        if (event["session_id"] or "").startswith("openai-"):
            tokens[event["event_info"]["type"]] += event["event_info"]["token_count"]
    return np.array(list(tokens.values()))


async def test_a_client_that_leaves_aborts_its_requests(client: Client) -> None:
    """They leave until one has got as far as the engine."""
    async with asynchronous(client) as oai:
        asked: dict[str, Any] = {"model": client.model, "messages": CHAT, "n": 64}
        before = counted(client, "chat_completion", "cancelled")
        while counted(client, "chat_completion", "cancelled") == before:
            stream = await oai.chat.completions.create(**asked, stream=True)
            await anext(aiter(stream))
            await stream.close()
        before = counted(client, "chat_completion", "cancelled")
        while counted(client, "chat_completion", "cancelled") == before:
            with pytest.raises(openai.APITimeoutError):
                await oai.chat.completions.create(**asked, timeout=httpx.Timeout(30, read=0.5))


def test_the_routes_are_documented_with_their_bodies(client: Client) -> None:
    document = httpx.get(f"{client.url}/api/v1/openapi.json").json()
    for path, field in (("completions", "prompt"), ("chat/completions", "messages")):
        body = document["paths"][f"/oai/api/v1/{path}"]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        assert field in schema["required"]
        assert "$ref" not in str(schema)
