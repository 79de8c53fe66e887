"""Our code inside vLLM's processes: patches, middlewares that commands name, the receiver of weights.

In: vLLM's start, if SKYRL_TINKER_VLLM is set, and requests to its server. Out: patched classes of vLLM, each
checked against the source of known releases; answers as arrays; weights pulled from the engine's host.
"""

import os

from skyrl_tinker.inference.vllm.vllm_arguments import ENABLED_BY


def register() -> None:
    """Apply our patches; vLLM calls this entry point in each of its processes, possibly more than once."""
    if os.environ.get(ENABLED_BY) == "1":
        from skyrl_tinker.inference.vllm.plugin import patch_set

        patch_set.apply()
