"""Entry point of vLLM's general plugins. No effect unless the environment variable ENABLED_BY is 1."""

import os

from skyrl_tinker.inference.vllm.vllm_arguments import ENABLED_BY


def register() -> None:
    """Apply our patches; vLLM calls this in each of its processes, possibly more than once."""
    if os.environ.get(ENABLED_BY) != "1":
        return
    from skyrl_tinker.inference.vllm.patches import patch_set

    patch_set.apply()
