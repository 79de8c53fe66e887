"""What clients of OpenAI's API send: read, accepted because it asks for nothing, or refused by name."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from skyrl_tinker.protocol.schemas.chats import NEUTRAL_IN_CHATS, ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import (
    NEUTRAL,
    NEUTRAL_IN_COMPLETIONS,
    CompletionRequest,
    FieldError,
    parse_openai,
)
from skyrl_tinker.protocol.schemas.sampling import MAX_STOPS

LONG = "x" * (64 << 10)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_openai(ChatCompletionRequest, CHAT | fields)


def completion(**fields: Any) -> CompletionRequest:
    return parse_openai(CompletionRequest, COMPLETION | fields)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        (7, (7,)),
        ([7, 8], (7, 8)),
        (["a", 7], ("a", 7)),
        ([], ()),
        (None, ()),
    ],
)
def test_stops_are_texts_and_token_ids(given: Any, read: tuple[str | int, ...]) -> None:
    assert completion(stop=given).stop == chat(stop=given).stop == read


@pytest.mark.parametrize("given", [True, [1.5], [["a"]], {"a": 1}, "", ["a", ""], ["a"] * (MAX_STOPS + 1)])
def test_other_stops_are_refused_in_one_sentence(given: Any) -> None:
    with pytest.raises(FieldError, match=r"^stop: [^;]*$") as refused:
        completion(stop=given)
    assert refused.value.field == "stop"


@pytest.mark.parametrize(("given", "read"), [(True, 0), (False, None), (None, None), (0, 0), (1, 1), (5, 5)])
def test_logprobs_of_a_completion_may_be_a_boolean_as_in_chats(given: Any, read: int | None) -> None:
    assert completion(logprobs=given).logprobs == read


def test_every_neutral_value_changes_nothing() -> None:
    for neutral, plain, make in (
        ({**NEUTRAL, **NEUTRAL_IN_CHATS}, chat(), chat),
        ({**NEUTRAL, **NEUTRAL_IN_COMPLETIONS}, completion(), completion),
    ):
        for field, values in neutral.items():
            for value in values:
                assert make(**{field: value}) == plain, field
            assert make(**{field: None}) == plain, field


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "seed": None, "n": 1, "stream": False, "stream_options": None, "stop": None},
        {"metadata": {"run": "1"}, "safety_identifier": "x", "prompt_cache_key": "y"},
        {"prompt_cache_retention": "24h", "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"tools": None, "tool_choice": None, "response_format": None, "audio": None, "prediction": None},
        {"top_logprobs": 0, "logprobs": False, "modalities": ["text"], "min_p": 0.0, "top_k": -1},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_what_clients_send_without_asking_for_anything_is_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(("seed", "read"), [(-1, 2**63 - 1), (2**63, 0), (7, 7)])
def test_seeds_are_read_as_those_of_samples(seed: int, read: int) -> None:
    assert chat(seed=seed).seed == read


@pytest.mark.parametrize("said", [{"content": None}, {}, {"content": ""}])
def test_an_assistant_may_have_said_nothing(said: dict[str, Any]) -> None:
    read = chat(messages=[*CHAT["messages"], {"role": "assistant", **said}]).messages[1]
    assert read.model_dump(exclude_none=True) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_all_others_have_to_say_something(role: str) -> None:
    for said in ({}, {"content": None}):
        with pytest.raises(FieldError, match=r"messages.0: content is missing or null"):
            chat(messages=[{"role": role, **said}])


def test_a_developer_is_the_system_under_openais_newer_name() -> None:
    assert chat(messages=[{"role": "developer", "content": "a"}]).messages[0].role == "system"


def test_marks_of_other_providers_caches_are_not_read() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "a"}
    marked = chat(messages=[{"role": "user", "content": [part | mark], **mark}])
    assert marked.model_dump() == chat(messages=[{"role": "user", "content": [part]}]).model_dump()


def test_an_answer_can_be_sent_back_as_the_sdk_dumps_it() -> None:
    answer = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": "thought",
    }
    read = chat(messages=[*CHAT["messages"], answer]).messages[1]
    assert (read.content, read.reasoning) == ("b", "thought")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("store", 0),
        ("service_tier", "flex"),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "structural_tag"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "no spaces", "schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": LONG}}}),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("stop_token_ids", [1]),
        ("ignore_eos", True),
        ("functions", [{"name": "f"}]),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"name": "no spaces"}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 129),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("modalities", ["text", "audio"]),
        ("verbosity", "low"),
        ("add_generation_prompt", False),
        ("web_search_options", {}),
        ("no_such_field", 1),
        ("reasoning_effort", "extreme"),
        ("separate_reasoning", "yes"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("presence_penalty", True),
        ("frequency_penalty", "1"),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", [1]),
        ("chat_template_kwargs", {"a": [2**64]}),
        ("tools", [{"function": {"name": "f", "parameters": {"const": 2**64 + 1}}}]),
        ("tools", [{"function": {"name": "f", "parameters": {"default": {"maximum": 2**64 + 1}}}}]),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [2**64 + 1]}}},
        ),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(FieldError, match=field) as refused:
        chat(**{field: value})
    assert refused.value.field == field


class Huge(BaseModel):
    """Numbers that need more than 64 bits."""

    below: Annotated[int, Field(lt=2**64)]
    key: Annotated[int, Field(ge=-(2**63) - 1, le=2**128 - 1)] = 2**70


def test_bounds_of_more_than_64_bits_are_served_as_the_floats_that_samplers_read() -> None:
    given = Huge.model_json_schema()
    read = chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": given}})
    tool = {"type": "function", "function": {"name": "f", "parameters": given, "strict": True}}
    form, tools = read.response_format, chat(tools=[tool]).tools
    assert form is not None
    assert form.json_schema is not None
    assert tools is not None
    for schema in (form.json_schema.of_answer, tools[0].function.parameters):
        assert schema is not None
        below, key = schema["properties"].values()
        assert repr(below["exclusiveMaximum"]) == repr(2.0**64)
        assert (repr(key["minimum"]), repr(key["maximum"])) == (repr(-(2.0**63)), repr(2.0**128))
        assert repr(key["default"]) == repr(2.0**70)


TOOLS: Any = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
CALL: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_call_and_its_result_are_messages() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]}
    read = chat(tools=TOOLS, messages=[*CHAT["messages"], answer, result]).messages[1:]
    assert [each.model_dump(exclude_none=True) for each in read] == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        result,
    ]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": "{}"}', '{"a": "{}"}'),
        ("{ }", "{ }"),
        *(
            (odd, "{}")
            for odd in ("", "null", '"a"', "[]", "1", '{"a": 1', '{"a": NaN}', "\ud800", "[" * 5000)
        ),
    ],
)
def test_a_call_without_arguments_that_can_be_read_ends_no_conversation(written: str, read: str) -> None:
    """As vLLM reads it; SGLang would refuse each later turn."""
    call = CALL | {"function": {"name": "f", "arguments": written}}
    answer = {"role": "assistant", "tool_calls": [call]}
    (found,) = chat(messages=[*CHAT["messages"], answer]).messages[-1].tool_calls or ()
    assert found.function.arguments == read


def test_a_call_that_has_no_arguments_has_an_empty_object() -> None:
    answer = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f"}}]}
    (found,) = chat(messages=[*CHAT["messages"], answer]).messages[-1].tool_calls or ()
    assert found.function.arguments == "{}"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "b"}, "b"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
        ({"reasoning": None, "reasoning_content": "b"}, "b"),
        ({"reasoning_content": ""}, ""),
        ({}, None),
    ],
)
def test_reasoning_goes_on_by_both_names(given: dict[str, str], read: str | None) -> None:
    """SGLang reads one of them, vLLM the other where it counts a prompt."""
    answer = {"role": "assistant", "content": "c", **given}
    message = chat(messages=[*CHAT["messages"], answer]).messages[-1]
    assert (message.reasoning, message.reasoning_content) == (read, read)


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "tool_calls of role user"),
        ({"role": "tool", "content": "a"}, "found role tool, expected tool_call_id with role tool"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "found role user, expected tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "content is missing"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls.0.function"),
    ],
)
def test_a_message_of_tools_has_the_fields_of_its_role(message: dict[str, Any], found: str) -> None:
    with pytest.raises(FieldError, match=found):
        chat(messages=[*CHAT["messages"], message])


def test_a_form_of_the_answer_goes_with_no_tools_and_no_logprobs() -> None:
    asked = {"response_format": {"type": "json_object"}}
    chat(**asked)
    chat(**asked, tools=TOOLS, tool_choice="none")
    with pytest.raises(FieldError, match="response_format: not with tools"):
        chat(**asked, tools=TOOLS)
    with pytest.raises(FieldError, match="logprobs: not with response_format, whose grammar"):
        chat(**asked, logprobs=True)


@pytest.mark.parametrize("restricted", ["strict", "single"])
def test_logprobs_of_a_grammar_are_refused_because_they_are_no_models(restricted: str) -> None:
    function = TOOLS[0]["function"] | {"strict": restricted == "strict"}
    fields: Any = {"tools": [{"type": "function", "function": function}]}
    fields["parallel_tool_calls"] = restricted != "single"
    chat(**fields)
    chat(**fields, logprobs=True, tool_choice="none")
    with pytest.raises(FieldError, match=r"logprobs: not with .*, whose grammar changes the distribution"):
        chat(**fields, logprobs=True)


def test_the_best_of_more_than_n_is_refused_by_name() -> None:
    assert completion(best_of=2, n=2).n == 2
    with pytest.raises(FieldError, match=r"best_of: .*expected the value of n, found 2") as refused:
        completion(best_of=2)
    assert refused.value.field == "best_of"


def test_an_effort_may_be_given_once_only() -> None:
    assert chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"})
    with pytest.raises(FieldError, match="reasoning_effort: another one is in chat_template_kwargs"):
        chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})


def test_of_many_unknown_fields_the_first_are_named() -> None:
    with pytest.raises(FieldError) as refused:
        chat(**{f"field_{number}": 1 for number in range(10_000)})
    assert str(refused.value) == "; ".join(f"field_{number} is not supported" for number in range(5))
