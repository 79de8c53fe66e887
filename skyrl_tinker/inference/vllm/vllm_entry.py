"""vLLM's server, `python -m skyrl_tinker.inference.vllm.vllm_entry`, with imports a fifth faster.

Garbage collection is off during them: its thousands of modules stay alive, and vLLM freezes them itself.
On a CPU they are nice. (`vllm serve` would need the distribution to be named vllm.)
"""

import os
from typing import Any

from skyrl_tinker.inference.constants import STARTING_NICER
from skyrl_tinker.system.processes import gc_paused, run_nicely


def load() -> Any:
    with gc_paused():
        from vllm.entrypoints.launchers.api_server.entry import main
    return main


main = run_nicely(load, int(os.environ.get(STARTING_NICER, "0")))

if __name__ == "__main__":
    main()
