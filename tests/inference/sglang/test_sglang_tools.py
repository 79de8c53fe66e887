"""Tool parsers of a real SGLang, once its entry has mended them: streams say the same as whole answers."""

import json
import os
import subprocess
from typing import Any

import pytest

from skyrl_tinker.inference.sglang.sglang_process import ENTRY, TOOL_PARSERS
from tests.support.sglang_cpu.sglang_server import interpreter

pytestmark = pytest.mark.long

HERMES = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LLAMA = '{"name": "%s", "parameters": %s}'
MISTRAL = '{"name": "%s", "arguments": %s}'
CODER = "<tool_call>\n<function=%s>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"
A1, B2 = ("f", '{"a": 1}'), ("other", '{"b": [2, "<"]}')
"""Two calls; the request has no tool of the second one's name."""
CUT = '<tool_call>\n{"name": "f", "arguments": {"a": 1'
Case = tuple[str, str, str, list[tuple[str, str]]]


def kept(parser: str, texts: dict[str, str]) -> dict[str, Case]:
    """Cases of answers in which no call can be read: all is content."""
    return {f"{parser}: {name}": (parser, text, text, []) for name, text in texts.items()}


CASES: dict[str, Case] = {
    "hermes: one": ("hermes", f"Well.\n{HERMES % A1}", "Well.\n", [A1]),
    "hermes: two": ("hermes", f"{HERMES % A1}\n{HERMES % B2}", "", [A1, B2]),
    "hermes: two of one tool": ("hermes", HERMES % A1 + HERMES % A1, "", [A1, A1]),
    "hermes: an unknown tool first": ("hermes", HERMES % B2 + HERMES % A1, "", [B2, A1]),
    "hermes: without a line": ("hermes", (HERMES % A1).replace("\n", ""), "", [A1]),
    "hermes: no object": ("hermes", HERMES % ("f", "null"), "", [("f", "null")]),
    "hermes: a text": ("hermes", HERMES % ("f", '"{"'), "", [("f", '"{"')]),
    "hermes: no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "hermes: text after it": ("hermes", f"{HERMES % A1} So.", " So.", [A1]),
    "hermes: the last without its end": ("hermes", (HERMES % A1 + HERMES % B2)[:-13], "", [A1, B2]),
    **kept(
        "hermes",
        {
            "none": "1 < 2",
            "a tag's beginning at the end": "a <",
            "cut in the mark": "a <tool_ca",
            "cut": f"a {CUT}",
            "the second one cut": f"{HERMES % A1}\n{CUT}",
            "ill-formed": HERMES % ("f", "{a}") + HERMES % A1,
            "no name": '<tool_call>{"arguments": {}}</tool_call>',
            "a number": HERMES.replace('"%s"', "5") % "{}",
            "nothing": "<tool_call>",
        },
    ),
    "llama3: one": ("llama3", LLAMA % A1, "", [A1]),
    "llama3: two": ("llama3", f"Well. <|python_tag|>{LLAMA % A1};{LLAMA % B2}", "Well. ", [A1, B2]),
    **kept(
        "llama3",
        {
            "an object that is an answer": '{"a": 1}',
            "an object in an answer": 'So: {"name": "f", "parameters": {}}',
            "no object": '{"a": 1};5',
            "cut": '{"name": "f", "parameters": {"a": 1',
            "the mark's beginning at the end": "a <|python",
        },
    ),
    "mistral: two": ("mistral", f"Well. [TOOL_CALLS] [{MISTRAL % A1}, {MISTRAL % B2}]", "Well. ", [A1, B2]),
    "mistral: two, compact": (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]other[ARGS]{"b": [2, "<"]}',
        "",
        [A1, B2],
    ),
    **kept(
        "mistral",
        {
            "cut": '[TOOL_CALLS] [{"name": "f", "argum',
            "no calls": "[TOOL_CALLS] [5]",
            "brackets": "a [1] b [T",
        },
    ),
    "qwen3_coder: two": (
        "qwen3_coder",
        f"Well.\n{CODER % ('f', 1)}\n{CODER % ('other', 'x')}",
        "Well.\n",
        [A1, ("other", '{"a": "x"}')],
    ),
    "qwen3_coder: the second one cut": (
        "qwen3_coder",
        f"{CODER % ('f', 1)}\n<tool_call>\n<function=f>\n<para",
        "\n<tool_call>\n<function=f>\n<para",
        [A1],
    ),
    **kept("qwen3_coder", {"cut": "a <tool_call>\n<func", "a tag's beginning at the end": "a <"}),
}
"""By name: parser, answer, its content, its calls."""

ASKED = """
import json, runpy, sys
entry = runpy.run_path(sys.argv[1])
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

entry["mend_parsers"](FunctionCallParser)
tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
tools = [Tool(function={"name": "g"}), Tool(function=tool)]


def restricts(name):
    try:
        return FunctionCallParser(tools, name).get_structure_constraint("auto") is not None
    except (AttributeError, TypeError, ValueError):  # without a tokenizer
        return True


def whole(name, text):  # as OpenAIServingChat._process_tool_calls
    parser = FunctionCallParser(tools, name)
    if not parser.has_tool_call(text):
        return text, []
    try:
        content, calls = parser.parse_non_stream(text)
    except Exception:
        return text, []
    return content, [(index, call.name, call.parameters) for index, call in enumerate(calls)]


def streamed(name, text, size):  # as a client puts it together
    parser = FunctionCallParser(tools, name)
    pieces = [parser.parse_stream_chunk(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(parser.parse_stream_end())
    calls = {}
    for call in (call for _, some in pieces for call in some):
        known = calls.get(call.tool_index, ("", ""))
        calls[call.tool_index] = (known[0] + (call.name or ""), known[1] + call.parameters)
    return "".join(content for content, _ in pieces), [(index, *call) for index, call in calls.items()]


free = [name for name in FunctionCallParser.ToolCallParserEnum if not restricts(name)]
read = {
    case: [whole(name, text), *(streamed(name, text, size) for size in (1, 7, 10**6))]
    for case, (name, text) in json.load(sys.stdin).items()
}
print(json.dumps([free, read]))
"""


@pytest.fixture(scope="module")
def told() -> Any:
    """The answers of one process: to import SGLang takes seconds."""
    done = subprocess.run(
        [str(interpreter()), "-c", ASKED, str(ENTRY)],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_FORWARD_UNKNOWN_TOOLS": "1"},
        input=json.dumps({case: given[:2] for case, given in CASES.items()}),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_parsers_that_are_taken_restrict_no_chats(told: Any) -> None:
    assert {*TOOL_PARSERS} <= {*told[0]}


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_an_answer_is_lost_and_its_stream_says_the_same(told: Any, case: str) -> None:
    _, _, content, calls = CASES[case]
    for said, made in told[1][case]:
        assert (said, made) == (content, [[index, *call] for index, call in enumerate(calls)])
