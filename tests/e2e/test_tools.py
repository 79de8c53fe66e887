"""Tools on the chat route: a model that learnt to call one is asked, answered and asked again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tinker import types
from transformers import AutoTokenizer

from skyrl_tinker.server.base_models.tiny_model import make_model
from tests.e2e.support.client import Client, datum
from tests.support.serve import serving

pytestmark = pytest.mark.long

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MODEL = "caller"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add to 3.",  # a template would be shown null for what is left out
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
STRICT: Any = {"type": "function", "function": TOOL["function"] | {"strict": True}}
QUESTION: Any = [{"role": "user", "content": "Add 2."}]
SAID = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
CALL, RESULT, ANSWER = {"name": "add", "arguments": '{"a": 2}'}, "5", "It is 5."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / MODEL
    make_model(directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def client(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home, settings = tmp_path_factory.mktemp("tools") / "home", 'tool_parser = "hermes"\n'
    options = ["--base-model", str(directory), "--model-name", MODEL]
    with serving(home, *options, settings=settings) as server, Client.of(server.url, MODEL) as client:
        yield client


@pytest.fixture(scope="module")
def oai(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.url}/oai/api/v1", api_key="any", max_retries=0) as made:
        yield made


def with_result(call: Any) -> Any:
    return [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT},
    ]


@pytest.fixture(scope="module")
def caller(client: Client, directory: Path) -> str:
    """The path of weights that call the tool, and say what it gave."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    dialogues = with_result(call)
    dialogues[1]["content"] = ""
    data = []
    for messages, tool, said in ((QUESTION, TOOL, SAID), (QUESTION, STRICT, SAID), (dialogues, TOOL, ANSWER)):
        asked = tokenizer.apply_chat_template(
            messages, tools=[tool], add_generation_prompt=True, return_dict=False
        )
        answer = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        weights = [0.0] * (len(asked) - 1) + [1.0] * len(answer)
        data.append(datum([*asked, *answer], weights=weights))
    training = client.new_full()
    steps = []
    for _ in range(120):
        steps.append(training.forward_backward(data, "cross_entropy"))
        training.optim_step(types.AdamParams(learning_rate=3e-3))
    assert steps[-1].result().metrics["loss:sum"] < 0.5, "it has not learnt its lines"
    return training.save_weights_for_sampler("caller").result().path


def asked(oai: openai.OpenAI, model: str, messages: Any = QUESTION, **fields: Any) -> Any:
    fields = {"tools": [TOOL], "temperature": 0, "max_tokens": 100} | fields
    return oai.chat.completions.create(model=model, messages=messages, **fields)


def test_a_call_is_made_answered_and_its_answer_told(oai: openai.OpenAI, caller: str) -> None:
    first = asked(oai, caller).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, call.function.model_dump()) == ("tool_calls", CALL)
    assert not first.message.content
    last = asked(oai, caller, with_result(call.model_dump())).choices[0]
    assert (last.finish_reason, last.message.content, last.message.tool_calls) == ("stop", ANSWER, None)


def test_an_answer_is_sent_back_as_the_sdk_dumps_it(oai: openai.OpenAI, caller: str) -> None:
    message = asked(oai, caller).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
    assert asked(oai, caller, [*QUESTION, message.model_dump(), result]).choices[0].message.content == ANSWER


def test_a_streamed_call_comes_in_pieces_that_make_it(oai: openai.OpenAI, caller: str) -> None:
    chunks = list(asked(oai, caller, stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    told = {
        part: "".join(getattr(piece.function, part) or "" for piece in pieces)
        for part in ("name", "arguments")
    }
    assert told["name"] == CALL["name"]
    assert json.loads(told["arguments"]) == json.loads(CALL["arguments"])
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_who_wants_no_call_gets_text(oai: openai.OpenAI, caller: str) -> None:
    said = asked(oai, caller, tool_choice="none").choices[0]
    assert (said.message.content, said.message.tool_calls) == (SAID, None)


def test_the_prompt_is_counted_with_its_tools(oai: openai.OpenAI, client: Client, caller: str) -> None:
    """To the token: one more for the answer than there is room is refused."""
    listed = httpx.get(f"{client.url}/api/v1/get_server_capabilities").json()["supported_models"]
    (served,) = (each for each in listed if each["model_name"] == client.model)
    used = asked(oai, caller).usage.prompt_tokens
    assert used > asked(oai, caller, tools=openai.NOT_GIVEN).usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match=f"{used} prompt tokens") as refused:
        asked(oai, caller, max_tokens=served["max_context_length"] - used + 1)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_tool_whose_schema_is_none_is_refused_by_name(
    oai: openai.OpenAI, client: Client, stream: bool
) -> None:
    for schema in ({"type": "no such type"}, {"type": "string", "pattern": "("}, {"enum": []}):
        wrong = {"name": "add", "strict": True, "parameters": {"properties": {"a": schema}}}
        with pytest.raises(openai.BadRequestError, match="tools: the sampler makes no answer") as refused:
            asked(oai, client.model, tools=[{"type": "function", "function": wrong}], stream=stream)
        assert refused.value.param == "tools"


def test_no_schema_of_others_takes_strict_tools_away(oai: openai.OpenAI, client: Client, caller: str) -> None:
    """With grammars chosen by the first schema, one with multipleOf would."""
    fives: Any = {"name": "a", "schema": {"type": "integer", "multipleOf": 5}}
    form: Any = {"type": "json_schema", "json_schema": fives}
    with pytest.raises(openai.BadRequestError, match="response_format: the sampler makes no answer"):
        oai.chat.completions.create(model=client.model, messages=QUESTION, response_format=form)
    (call,) = asked(oai, caller, tools=[STRICT]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 2}
    tree = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}}
    recursive = {"type": "function", "function": STRICT["function"] | {"parameters": tree}}
    assert asked(oai, client.model, tools=[recursive], max_tokens=8).choices


def test_a_strict_tool_and_a_single_call_hold_for_any_weights(oai: openai.OpenAI, caller: str) -> None:
    (call,) = asked(oai, caller, tools=[STRICT], parallel_tool_calls=False).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 2}
    with pytest.raises(openai.BadRequestError, match="logprobs: not with a strict tool"):
        asked(oai, caller, tools=[STRICT], logprobs=True)
