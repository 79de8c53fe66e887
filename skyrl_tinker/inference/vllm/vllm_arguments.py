"""Arguments of vLLM's API server by name: those that users may give, and their format.

Unknown names and values are left to vLLM itself: its parser takes seconds to import.
"""

import re
from typing import Any

from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.servers.replica_spec import Arguments

ENABLED_BY = "SKYRL_TINKER_VLLM"
"""Environment variable that switches our plugin on; we set it for the servers that we start."""
VERSION_PULL = "skyrl_tinker.inference.vllm.plugin.middlewares.VersionPull"
"""Middleware by which a server on another host gets weights."""
SETTINGS = {
    "model": "base_model",
    "served-model-name": "model_name",
    "dtype": "trainer_dtype",
    "max-model-len": "context_length",
    "tensor-parallel-size": "tensor_parallel_size",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "max-loras": "max_loras",
    "max-lora-rank": "max_lora_rank",
    "max-cpu-loras": "max_cpu_loras",
    "logprobs-mode": "sampled_logprobs",
    "weight-transfer-config": "weight_transport",
    "reasoning-parser": "reasoning_parser",
    "tool-call-parser": "tool_parser",
    "enable-auto-tool-choice": "tool_parser",
    "enable-return-routed-experts": "router_replay",
    "enable-sleep-mode": "placement",
}
"""Arguments that follow from a setting."""
OURS = frozenset(
    {
        *("host", "port", "uds", "grpc-port", "root-path", "middleware", "api-key", "config", "headless"),
        *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers"),
        *("load-format", "config-format", "generation-config", "tokenizer", "tokenizer-mode"),
        *("skip-tokenizer-init", "tokens-only", "runner", "convert"),
        *("enable-lora", "enable-scale-out", "enable-prompt-tokens-details", "max-logprobs"),
        *("scheduling-policy", "lora-target-modules", "tool-strict-level"),
    }
)
"""Arguments on which skyrl-tinker relies."""
ONE_WAY = frozenset({"disable-log-stats"})
"""Switches that are off by default, and for which vLLM has no opposite."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's slots for adapters can have."""
WARM_UP_RANK = 8  # of the adapters with which a sampler warms up
_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[\w.-]+)?")


def check(given: Arguments) -> None:
    """Raise StartupError for an argument that users may not give, or that is malformed."""
    for name, value in given.items():
        if not _NAME.fullmatch(name) or value is None:
            raise StartupError(
                f"vllm_args: found {name} = {value!r}, expected a name as max-num-seqs and its value"
            )
        _check_free(name)
    workers(given, 1)


def merged(ours: Arguments, given: Arguments) -> dict[str, Any]:
    """Return our arguments, overridden by the given ones. A switch of ours given as false is left out.

    Objects are merged entry by entry.
    """
    one_way = {*ONE_WAY, *(name for name, value in ours.items() if value is True)}
    both = {**ours, **given}
    for name, value in ours.items():
        if isinstance(value, dict) and isinstance(both[name], dict):
            both[name] = {**value, **both[name]}
    return {name: value for name, value in both.items() if not (name in one_way and value is False)}


def workers(arguments: Arguments, tensor_parallel_size: int) -> int:
    """Count the worker processes of a replica, each with its own GPU."""
    others = (arguments.get(f"{kind}-parallel-size", 1) for kind in ("data", "pipeline", "prefill-context"))
    count = tensor_parallel_size
    for size in others:
        if not isinstance(size, int) or size < 1:
            raise StartupError(f"vllm_args: found a parallel size of {size!r}, expected a positive integer")
        count *= size
    return count


def slot_rank(rank: int) -> int:
    """Return the rank of slots for adapters of at most this rank; 0 for no adapters."""
    return next(each for each in (0, *SLOT_RANKS) if each >= rank)


def expert_slot_rank(rank: int, experts_per_token: int) -> int:
    """Return the rank of each expert's slots, given the rank of other layers' slots."""
    return slot_rank(max(1, min(rank, WARM_UP_RANK), rank // experts_per_token))


def _check_free(name: str) -> None:
    option = name.partition(".")[0]
    if option.startswith("no-"):
        raise StartupError(f"vllm_args: found {name}, expected {name.removeprefix('no-')} = false")
    taken = next(
        (each for each in (*SETTINGS, *OURS) if each.startswith(option)), None
    )  # vLLM takes prefixes
    if taken is None:
        return
    advice = f"follows from the setting {SETTINGS[taken]}" if taken in SETTINGS else "is set by skyrl-tinker"
    raise StartupError(f"vllm_args: {name} cannot be given: vLLM's {taken} {advice}")
