"""Parsers of tools, as a real SGLang has them."""

import os
import subprocess

import pytest

from skyrl_tinker.inference.sglang.sglang_process import TOOL_PARSERS
from tests.support.sglang_cpu.sglang_server import interpreter

pytestmark = pytest.mark.long

FREE = """
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

tools = [Tool(function={"name": "f", "parameters": {"type": "object"}})]


def restricts(name):
    try:
        return FunctionCallParser(tools, name).get_structure_constraint("auto") is not None
    except (AttributeError, TypeError, ValueError):  # without a tokenizer
        return True


print(*(name for name in FunctionCallParser.ToolCallParserEnum if not restricts(name)))
"""


def test_the_parsers_that_are_taken_restrict_no_chats() -> None:
    run = [str(interpreter()), "-c", FREE]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(run, env=environment, check=True, capture_output=True, text=True)
    assert {*TOOL_PARSERS} <= {*done.stdout.splitlines()[-1].split()}
