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


def serve() -> None:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.parser import conversation

    show_as_given(Tool)

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
