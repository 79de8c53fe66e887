"""Start of SGLang's server: a script for SGLang's environment, of which this package is no part.

    python sglang_entry.py VARIABLE OPTION…

VARIABLE: that of the key of requests, which others would see in the list of processes.
"""

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

SAMPLING = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>", None),
    "mistral": ("[TOOL_CALLS", None),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
"""By parser of tools: the beginning of its calls, and an end after which SGLang leaves text out."""


def sample(original: Callable[..., Any], probabilities: Any, *given: Any, **named: Any) -> Any:
    """Let torch sample where weights give NaN: it raises an error, which would end the server for all.

    The logprob of the token is NaN too, by which its request fails.
    """
    return original(probabilities.nan_to_num(1.0), *given, **named)


def prepare() -> None:
    """Set the hooks of a process that the server has started."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SAMPLING, sample, HookType.AROUND)


def show_as_given(tool: Any) -> None:
    """Have templates show what a client said of a tool: SGLang adds `defer_loading`, which no model knows."""
    original = tool.model_dump
    tool.model_dump = lambda each, **options: original(each, **options, exclude_none=True)


def mend_parsers(parser: Any) -> None:
    """Mend the parsers of MARKS; `parser`: FunctionCallParser."""
    for name, (mark, end) in MARKS.items():
        read_whole(parser.ToolCallParserEnum[name], mark, end)


def read_whole(detector: Any, mark: str, end: str | None) -> None:
    """Have calls read once the answer has ended, and shown as text unless all can be read.

    Read in pieces, calls of unknown tools, cut and ill-formed ones, and text that may be a mark's beginning,
    would be lost, or joined with others.
    """
    from sglang.srt.function_call.core_types import StreamingParseResult

    original = detector.detect_and_parse
    detector.shown = False

    def begin(self: Any, text: str) -> int:
        """Return where calls begin, or may begin once there is more text."""
        if not self.shown and self.has_tool_call(text[:1]):  # llama3: the whole answer is an object
            return 0
        return next(at for at in range(len(text) + 1) if mark.startswith(text[at : at + len(mark)]))

    def hold(self: Any, piece: str, tools: Any) -> Any:
        text = self._buffer + piece
        at = begin(self, text)
        self.shown, self._buffer = self.shown or at > 0, text[at:]
        return StreamingParseResult(normal_text=text[:at])

    def read(self: Any, text: str, tools: Any) -> Any:
        at = begin(self, text)
        try:
            found = original(self, text[at:], tools)
        except Exception:  # by JSON that is no call
            found = StreamingParseResult()
        if not found.calls or not all(call.name for call in found.calls):
            return StreamingParseResult(normal_text=text)
        for index, call in enumerate(found.calls):
            call.tool_index = index
        rest = text.rpartition(end)[2] if end and end in text else ""
        if mark in rest and text.count(mark) == len(found.calls):  # the last call has no end
            rest = ""
        found.normal_text = text[:at] + found.normal_text + rest
        return found

    detector.detect_and_parse, detector.parse_streaming_increment = read, hold
    detector.finish = lambda self, tools: read(self, self._buffer, tools)


def serve() -> None:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser import conversation

    show_as_given(Tool)
    mend_parsers(FunctionCallParser)

    # Where the path of a model has a word such as `points` or `janus`, SGLang would take another chat
    # template than the tokenizer's.
    conversation.matching_function_registry.clear()
    if key := os.environ[sys.argv.pop(1)]:
        sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    serve()
elif __name__ == "__mp_main__":
    prepare()
