"""vLLM's server, `python -m skyrl_tinker.inference.vllm.vllm_entry`, with imports a fifth faster.

Garbage collection is off during them: its thousands of modules stay alive, and vLLM freezes them itself.
(`vllm serve` would need the distribution to be named vllm.)
"""

import gc

gc.disable()

from vllm.entrypoints.launchers.api_server.entry import main  # noqa: E402

gc.enable()

if __name__ == "__main__":
    main()  # type: ignore[no-untyped-call]
