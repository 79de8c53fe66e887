"""Facts of the installed vLLM that are known here by name: parsers that restrict, words of a failure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker import config
from skyrl_tinker.errors import RequestGivenUpError, SamplerError, StartupError
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from skyrl_tinker.inference.vllm.vllm_process import RESTRICTING_PARSERS
from skyrl_tinker.protocol.schemas.chats import FunctionCall
from skyrl_tinker.server.base_models.base_model import resolve
from tests.support.tiny_models import write_tiny

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
A1, B2 = ["f", '{"a": 1}'], ["other", '{"b": [2, "<"]}']
READ: list[tuple[str, str | None, list[list[str]]]] = [
    (f"Well. {CALL % tuple(A1)}\n{CALL % tuple(B2)}", "Well. ", [A1, B2]),
    (CALL % tuple(B2) + CALL % tuple(A1), None, [B2, A1]),
    (CALL % ("f", "null"), None, [["f", "null"]]),
    (CALL % ("f", '"{"'), None, [["f", '"{"']]),
]
"""Answers of the parser `hermes`, with their content and calls; the request names no tool."""
ODD = ["", "null", '"a"', "[]", '{"a": 1', "{}"]
ASKED = """
import json
import sys
from vllm.renderers import chat_utils
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError
from vllm.tool_parsers import ToolParserManager as known

parsers = {name: known.get_tool_parser(name) for name in known.list_registered()}
restricting = [name for name, parser in parsers.items() if parser.default_tool_strict_level]
try:
    GenerateBaseServing._raise_if_error(None, "error", "a")
except GenerationError as error:
    given_up = json.loads(create_error_response(error).model_dump_json())["error"]


class Asked:
    tools, tool_choice = (), "auto"


def parsed(text):
    found = parsers["hermes"](object()).extract_tool_calls(text, Asked)
    return found.content, [[call.function.name, call.function.arguments] for call in found.tool_calls]


def streamed(text):
    parser, calls, content = parsers["hermes"](object()), {}, ""
    for at, piece in enumerate(text):
        delta = parser.extract_tool_calls_streaming(text[:at], text[: at + 1], piece, (), (), (), Asked)
        content += delta.content or "" if delta else ""
        for call in delta.tool_calls if delta else ():
            known = calls.setdefault(call.index, ["", ""])
            known[0] += call.function.name or ""
            known[1] += call.function.arguments or ""
    return content or None, [*calls.values()]


def shown(arguments):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    getattr(chat_utils, "chat_message", chat_utils)._postprocess_messages([message])  # 0.33 has it one below
    return message["tool_calls"][0]["function"]["arguments"]


texts, odd = json.load(sys.stdin)
read = [[parsed(text), streamed(text)] for text in texts]
history = [shown(arguments) for arguments in odd]
print(json.dumps({"restricting": restricting, "given_up": given_up, "read": read, "history": history}))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Answers of one process: it imports vLLM, which takes seconds."""
    given = json.dumps([[text for text, _, _ in READ], ODD])
    run = [sys.executable, "-c", ASKED]
    done = subprocess.run(run, input=given, check=True, capture_output=True, text=True)
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_parsers_that_restrict_what_is_sampled_without_being_asked(told: dict[str, Any]) -> None:
    assert sorted(told["restricting"]) == sorted(RESTRICTING_PARSERS)


def test_they_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    for name in RESTRICTING_PARSERS:
        with pytest.raises(StartupError, match=f"tool_parser: found {name}, expected another"):
            resolve(config.load(base_model=str(tmp_path), tool_parser=name))
    resolve(config.load(base_model=str(tmp_path), tool_parser="hermes"))


def test_only_words_tell_that_one_request_was_given_up(told: dict[str, Any]) -> None:
    """Status, type and code are those of all its failures."""
    error = told["given_up"]
    assert isinstance(VLLM.refusal(error["code"], error["message"]), RequestGivenUpError)
    other = VLLM.refusal(error["code"], "EngineCore encountered an issue.")
    assert type(other) is SamplerError


def test_calls_of_one_answer_are_apart_and_those_of_unknown_tools_are_told(told: dict[str, Any]) -> None:
    for (_, content, calls), found in zip(READ, told["read"], strict=True):
        for said, made in found:
            assert (said or "").strip() == (content or "").strip()
            assert made == calls


def test_arguments_that_are_no_object_are_shown_as_an_empty_one(told: dict[str, Any]) -> None:
    """So ours are, whoever samples (FunctionCall)."""
    assert told["history"] == [{}] * len(ODD)
    assert {FunctionCall(name="f", arguments=odd).arguments for odd in ODD} == {"{}"}
