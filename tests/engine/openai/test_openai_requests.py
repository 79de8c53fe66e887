"""OpenAI's fields in vLLM's bodies, by what the model's chat template reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities, chat_abilities
from skyrl_tinker.engine.openai.openai_requests import (
    OpenAIRequest,
    listed,
    prompt_lengths,
    repeated,
    require_one_sequence,
    texts_to_count,
    upstream_body,
)
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import CompletionRequest, FieldError, parse_openai
from skyrl_tinker.protocol.validation.scores import MAX_LISTED
from skyrl_tinker.server.base_models.tiny_model import make_model

EOS = (1, 2)
FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, EOS)
USER = [{"role": "user", "content": "a"}]
PLAIN = ChatAbilities(frozenset({"messages", "message", "content"}))
SWITCH = ChatAbilities(PLAIN.words | {"enable_thinking", "think"})
DEGREES = ChatAbilities(PLAIN.words | {"reasoning_effort"})


def chat(abilities: ChatAbilities, **fields: Any) -> dict[str, Any]:
    request = parse_openai(
        ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    )
    body = upstream_body(request, 5, FACTS, abilities)
    (counted,) = texts_to_count(request, FACTS, abilities)
    for field in ("chat_template_kwargs", "tools"):
        assert counted.get(field) == body.get(field), "another prompt is counted"
    return body


def test_where_prompts_are_computed_apart_a_request_has_one_sequence() -> None:
    several = parse_openai(CompletionRequest, {"model": "m", "prompt": [5], "n": 3})
    require_one_sequence(parse_openai(CompletionRequest, {"model": "m", "prompt": [5]}), 1)
    with pytest.raises(FieldError, match="n: found 6 sequences in all, expected 1 with prefill_urls"):
        require_one_sequence(several, 2)


def test_greedy_choices_are_sampled_once_and_all_given() -> None:
    """VLLM refuses several of them."""
    asked = {"model": "m", "prompt": [5], "n": 3}
    for temperature, sampled in ((1, 3), (0, 1)):
        request = parse_openai(CompletionRequest, {**asked, "temperature": temperature})
        assert upstream_body(request, 1, FACTS, PLAIN)["n"] == sampled
    require_one_sequence(request, 1)
    answer = {
        "choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }
    given = repeated(answer, 2)
    assert [(each["index"], each["text"]) for each in given["choices"]] == list(enumerate("aabb"))
    assert given["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert repeated({"choices": []}, 2) == {"choices": []}


@pytest.mark.parametrize(
    ("prompt", "counts", "named"), [("", [0], 0), (["a", ""], [1, 0], 1), ([[5], []], [], 1)]
)
def test_an_empty_prompt_is_refused_by_name(prompt: Any, counts: list[int], named: int) -> None:
    request = parse_openai(CompletionRequest, {"model": "m", "prompt": prompt})
    with pytest.raises(FieldError, match=rf"prompt\[{named}\]: empty, expected at least one token"):
        prompt_lengths(request, counts, FACTS)


def test_an_echo_lists_so_many_logprobs_at_most() -> None:
    """A sampler sends all of them at once, and answers nobody else meanwhile."""
    asked = {"model": "m", "prompt": ["a", "b"], "max_tokens": 0, "n": 2}
    half = MAX_LISTED // 16
    for fields in ({"echo": True, "logprobs": 4}, {"echo": True}, {"max_tokens": 1, "logprobs": 20}):
        prompt_lengths(parse_openai(CompletionRequest, {**asked, **fields}), [half, half], FACTS)
    wrong = parse_openai(CompletionRequest, {**asked, "echo": True, "logprobs": 4})
    with pytest.raises(FieldError, match=r"logprobs: .* x n 2 x 4 = .* with echo") as refused:
        prompt_lengths(wrong, [half, half + 1], FACTS)
    assert refused.value.field == "logprobs"


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 0),
        ({"logprobs": 5}, 0),
        ({"logprobs": 5, "echo": True}, 3000),
        ({"logprobs": 0, "echo": True}, 600),
    ],
)
def test_logprobs_that_an_echo_lists_are_counted(fields: dict[str, Any], count: int) -> None:
    request = parse_openai(CompletionRequest, {"model": "m", "prompt": "a", "n": 2, **fields})
    assert listed(request, 300) == count


@pytest.mark.parametrize("added", [True, False])
def test_a_prompt_of_text_is_counted_and_completed_with_or_without_the_tokenizers_own_tokens(
    added: bool,
) -> None:
    """A chat that the client rendered itself has its beginning already."""
    request = parse_openai(
        CompletionRequest, {"model": "m", "prompt": ["a", "b"], "add_special_tokens": added}
    )
    counted = [{"prompt": prompt, "add_special_tokens": added} for prompt in ("a", "b")]
    assert texts_to_count(request, FACTS, PLAIN) == counted
    assert upstream_body(request, 5, FACTS, PLAIN)["add_special_tokens"] is added


def test_stops_go_on_as_texts_and_token_ids_beside_the_end_of_text() -> None:
    request = parse_openai(CompletionRequest, {"model": "m", "prompt": [5], "stop": ["x", 7, "y", 9]})
    body = upstream_body(request, 1, FACTS, PLAIN)
    assert (body["stop"], body["stop_token_ids"]) == (["x", "y"], [*EOS, 7, 9])
    assert VLLM.openai_body(body, "m", 0)["ignore_eos"]


JSON = {"type": "json_object"}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"properties": {"a": {"const": None}}}, "strict": True},
}


def test_a_stop_beyond_the_vocabulary_is_refused() -> None:
    request = parse_openai(CompletionRequest, {"model": "m", "prompt": [5], "stop": [512]})
    with pytest.raises(FieldError, match=r"stop\[0\] is 512, expected a token id in \[0, 512\)"):
        upstream_body(request, 1, FACTS, PLAIN)


@pytest.mark.parametrize(
    ("model", "field", "value", "message"),
    [
        (CompletionRequest, "seed", 0, "seed is not supported by .* engine, Plain"),
        (CompletionRequest, "temperature", 0.009, "temperature: expected 0 .* least 0.01, found 0.009"),
        (CompletionRequest, "stop", ["a", "b"], "stop: found 2 strings, expected at most 1 for .*, Plain"),
        (CompletionRequest, "max_tokens", 0, "max_tokens: found 0, expected at least 1 for .*, Plain"),
        (CompletionRequest, "add_special_tokens", False, "add_special_tokens is not supported by .*, Plain"),
        (ChatCompletionRequest, "response_format", JSON, "response_format is not supported by .*, Plain"),
        (ChatCompletionRequest, "response_format", SCHEMA, "response_format is not supported by .*, Plain"),
        (ChatCompletionRequest, "logprobs", True, "streamed_chat_logprobs is not supported by .*, Plain"),
        (
            ChatCompletionRequest,
            "stop",
            ["a", "b"],
            "stop: found 2 strings, expected at most 1 for .*, Plain",
        ),
    ],
)
def test_what_the_sampling_engine_lacks_is_refused_by_name(
    model: type[OpenAIRequest], field: str, value: Any, message: str
) -> None:
    asked = (
        {"prompt": [5], "echo": True} if model is CompletionRequest else {"messages": USER, "stream": True}
    )
    request = parse_openai(model, {"model": "m", **asked, field: value})
    assert upstream_body(request, 1, FACTS, PLAIN)[field] == value
    plain = SamplerAbilities(
        *("Plain", 0.01, 1),
        fewest_tokens=1,
        seed=False,
        add_special_tokens=False,
        response_format=False,
        streamed_chat_logprobs=False,
    )
    with pytest.raises(FieldError, match=message) as refused:
        upstream_body(request, 1, replace(FACTS, sampler=plain), PLAIN)
    assert refused.value.field == field


def test_what_the_sampling_engine_lacks_hinders_nothing_else() -> None:
    lacking = replace(FACTS, sampler=SamplerAbilities(streamed_chat_logprobs=False, fewest_tokens=1))
    for fields in ({"stream": True}, {"logprobs": True}):
        asked = parse_openai(ChatCompletionRequest, {"model": "m", "messages": USER, **fields})
        assert upstream_body(asked, 1, lacking, PLAIN)
    streamed = {"model": "m", "prompt": [5], "stream": True, "logprobs": 1}
    assert upstream_body(parse_openai(CompletionRequest, streamed), 1, lacking, PLAIN)


def test_reasoning_goes_under_both_names() -> None:
    choices = [{"message": {"reasoning": "because"}}, {"delta": {"reasoning": "so"}}, {"delta": {}}]
    response = VLLM.openai_reader({})({"choices": choices})
    said = [{"reasoning": text, "reasoning_content": text} for text in ("because", "so")]
    assert response == {"choices": [{"message": said[0]}, {"delta": said[1]}, {"delta": {}}]}


SPECIAL = ChatAbilities(PLAIN.words, special_tokens={"<|im_end|>": 7, "</s>": 9})


def test_the_text_of_a_special_token_stops_as_its_id_because_no_answer_shows_it() -> None:
    request = parse_openai(CompletionRequest, {"model": "m", "prompt": [5], "stop": ["</s>", "x", "im_end"]})
    assert upstream_body(request, 1, FACTS, SPECIAL)["stop_token_ids"] == [*EOS, 9]
    assert chat(SPECIAL, stop="<|im_end|>")["stop_token_ids"] == [*EOS, 7]


def test_a_stop_with_a_special_token_among_other_text_is_refused_by_name() -> None:
    with pytest.raises(FieldError, match=r"stop: '</s>\\n' has the special token </s>, .* that token alone"):
        chat(SPECIAL, stop="</s>\n")


@pytest.mark.parametrize("fast", [True, False])
def test_special_tokens_are_read_where_the_tokenizer_keeps_them(fast: bool, tmp_path: Path) -> None:
    tokens = {7: {"content": "<|im_end|>", "special": True}, 8: {"content": "<think>", "special": False}}
    added = [{"id": number, **token} for number, token in tokens.items()]
    file, content = (
        ("tokenizer.json", {"added_tokens": added})
        if fast
        else ("tokenizer_config.json", {"added_tokens_decoder": tokens})
    )
    (tmp_path / file).write_text(json.dumps(content))
    assert chat_abilities(tmp_path, None, None).special_tokens == {"<|im_end|>": 7}


_FLAGGED = {"__type": "AddedToken", "content": "er", "lstrip": False, "rstrip": False, "special": True}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "Ġthe", "bos_token": _FLAGGED, "add_bos_token": False}),
        ("tokenizer_config.json", {"extra_special_tokens": ["Ġthe", "er"], "unk_token": None}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "Ġthe", "pad_token": "er"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"THE": {"content": "Ġthe", "special": True}}}),
        ("special_tokens_map.json", {"sep_token": {"content": "Ġthe"}, "cls_token": "er"}),
    ],
)
def test_what_the_configuration_makes_special_no_answer_shows_either(
    file: str, content: dict[str, Any], tmp_path: Path
) -> None:
    """As the samplers' tokenizer has it."""
    make_model(tmp_path)
    vocabulary = AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    decoder = content.get("added_tokens_decoder", {})
    content = content | ({"added_tokens_decoder": {vocabulary["Ġthe"]: decoder["THE"]}} if decoder else {})
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / file).write_text(json.dumps((own if file == "tokenizer_config.json" else {}) | content))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    hidden = {
        text: token
        for text, token in vocabulary.items()
        if tokenizer.decode([token]) and not tokenizer.decode([token], skip_special_tokens=True)
    }
    assert "Ġthe" in hidden
    assert chat_abilities(tmp_path, None, None).special_tokens == hidden


def test_what_changes_no_answer_is_not_handed_on() -> None:
    body = chat(PLAIN, user="me", metadata={"a": "b"}, prompt_cache_key="k", store=False, tools=[], top_k=4)
    assert body.keys() <= {
        *("messages", "n", "max_tokens", "temperature", "top_p", "top_k", "presence_penalty"),
        *("frequency_penalty", "stream", "logprobs", "stop_token_ids", "stop"),
    }
    assert body["top_k"] == 4


def test_a_template_gets_the_variables_that_it_reads() -> None:
    body = chat(
        SWITCH, chat_template_kwargs={"enable_thinking": False, "return_dict": False, "truncation": 1}
    )
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in chat(PLAIN, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("abilities", "effort", "variables"),
    [
        (DEGREES, "low", {"reasoning_effort": "low"}),
        (DEGREES, "none", {"reasoning_effort": "none"}),
        (SWITCH, "high", {"enable_thinking": True}),
        (SWITCH, "none", {"enable_thinking": False}),
        (PLAIN, "none", None),
    ],
)
def test_an_effort_is_what_the_template_calls_it(
    abilities: ChatAbilities, effort: str, variables: dict[str, Any] | None
) -> None:
    assert chat(abilities, reasoning_effort=effort).get("chat_template_kwargs") == variables


def test_a_variable_given_by_name_goes_before_what_an_effort_means() -> None:
    body = chat(SWITCH, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert body["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("words", "effort"), [(PLAIN.words, "low"), (PLAIN.words | {"think"}, "none")], ids=["plain", "always"]
)
def test_an_effort_that_the_template_cannot_give_is_refused_by_name(
    words: frozenset[str], effort: str
) -> None:
    with pytest.raises(FieldError, match=f"reasoning_effort: {effort} is not supported") as refused:
        chat(ChatAbilities(words), reasoning_effort=effort)
    assert refused.value.field == "reasoning_effort"


def test_reasoning_is_separated_where_the_server_has_a_parser_and_nowhere_else() -> None:
    parsing = ChatAbilities(PLAIN.words, "qwen3")
    chat(PLAIN, separate_reasoning=False)
    chat(parsing, separate_reasoning=True)
    chat(parsing)
    with pytest.raises(FieldError, match=r"separate_reasoning: true .* reasoning_parser is not set"):
        chat(PLAIN, separate_reasoning=True)
    with pytest.raises(FieldError, match=r"separate_reasoning: false .* reasoning_parser is qwen3"):
        chat(parsing, separate_reasoning=False)


TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
CALLED: Any = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
CALLING = ChatAbilities(PLAIN.words | {"tools", "tool_calls"}, tool_parser="hermes")


def test_tools_go_on_to_samplers_and_into_the_count_of_tokens() -> None:
    body = chat(CALLING, tools=TOOLS, parallel_tool_calls=False)
    assert body["tools"] == TOOLS
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)
    assert chat(CALLING, tools=TOOLS, tool_choice="none")["tool_choice"] == "none"
    request = parse_openai(ChatCompletionRequest, {"model": "m", "messages": USER, "tools": TOOLS})
    (counted,) = texts_to_count(request, FACTS, CALLING)
    assert (counted["tools"], counted["tool_choice"]) == (TOOLS, "auto")


STRICT = [{"type": "function", "function": {"name": "f", "strict": True}}]


@pytest.mark.parametrize(
    ("asked_for", "free", "lacked", "param"),
    [
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": True}, "parallel_tool_calls", None),
        ({"tools": STRICT}, {"tools": TOOLS}, "strict_tools", "tools"),
    ],
)
def test_calls_that_need_a_grammar_are_refused_where_there_is_none(
    asked_for: dict[str, Any], free: dict[str, Any], lacked: str, param: str | None
) -> None:
    lacking = replace(FACTS, sampler=SamplerAbilities("Plain", **{lacked: False}))  # type: ignore[arg-type]
    asked = {"model": "m", "messages": USER, "tools": TOOLS, **asked_for}
    for fields in ({"tool_choice": "none"}, {"tools": []}, free):
        assert upstream_body(parse_openai(ChatCompletionRequest, asked | fields), 1, lacking, CALLING)
    with pytest.raises(FieldError, match=f"{lacked} is not supported by .* engine, Plain") as refused:
        upstream_body(parse_openai(ChatCompletionRequest, asked), 1, lacking, CALLING)
    assert refused.value.field == (param or lacked)


def test_without_tools_nothing_of_them_goes_on() -> None:
    body = chat(CALLING, tool_choice="none", parallel_tool_calls=False, tools=[])
    assert not body.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


@pytest.mark.parametrize(
    ("abilities", "fields", "found"),
    [
        (ChatAbilities(CALLING.words), {"tools": TOOLS}, "tools: .* its tool_parser is not set"),
        (
            ChatAbilities(PLAIN.words, tool_parser="hermes"),
            {"tools": TOOLS},
            "tools: the chat template of this model does not show tools",
        ),
        (
            PLAIN,
            {"messages": [{"role": "user", "content": "a"}, CALLED]},
            "messages: the chat template of this model does not show tool_calls",
        ),
        (
            PLAIN,
            {"messages": [{"role": "tool", "tool_call_id": "1", "content": "a"}]},
            "messages: the chat template of this model does not show tool$",
        ),
    ],
)
def test_tools_that_the_model_would_not_see_or_nobody_would_read_are_refused(
    abilities: ChatAbilities, fields: dict[str, Any], found: str
) -> None:
    with pytest.raises(FieldError, match=found):
        chat(abilities, **fields)


def test_huge_calls_and_tools_are_refused_without_counting() -> None:
    huge: Any = {"name": "f", "description": "a" * 200_000}
    with pytest.raises(FieldError, match="characters, expected at most"):
        chat(CALLING, tools=[{"type": "function", "function": huge}])
    called = {**CALLED, "tool_calls": [CALLED["tool_calls"][0] | {"id": "a" * 200_000}]}
    with pytest.raises(FieldError, match="characters, expected at most"):
        chat(CALLING, messages=[{"role": "user", "content": "a"}, called])


@pytest.mark.parametrize(
    "template", ["{{ a_b }}\n{{ c }}", [{"name": "default", "template": "{{ a_b }}\n{{ c }}"}]]
)
def test_the_template_is_read_where_the_tokenizer_keeps_it(template: Any, tmp_path: Path) -> None:
    assert chat_abilities(tmp_path, None, None).words == set()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert chat_abilities(tmp_path, None, None).words == {"a_b", "c"}
    (tmp_path / "chat_template.jinja").write_text("{{ d }}")
    assert chat_abilities(tmp_path, None, None).words == {"d"}


def test_a_huge_template_variable_is_refused_without_counting() -> None:
    with pytest.raises(FieldError, match="characters, expected at most"):
        chat(SWITCH, chat_template_kwargs={"enable_thinking": "a" * 200_000})
