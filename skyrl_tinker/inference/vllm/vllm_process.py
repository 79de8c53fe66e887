"""Flags, environment and limits of a replica's process of vLLM 0.32 or 0.33."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.constants import BASE_MODEL, START_NICENESS, STARTING_NICER, TOKEN
from skyrl_tinker.inference.servers.ports import LOOPBACK
from skyrl_tinker.inference.servers.replica_spec import Arguments, ModelToServe, SamplerSpec, as_flags
from skyrl_tinker.inference.servers.sampler_memory import kv_bytes, require_memory
from skyrl_tinker.inference.vllm import vllm_arguments
from skyrl_tinker.inference.vllm.vllm_arguments import ENABLED_BY, VERSION_PULL, merged

if TYPE_CHECKING:
    from skyrl_tinker.inference.vllm.vllm_dialect import VllmDialect

ENTRY = "skyrl_tinker.inference.vllm.vllm_entry"
PACKED_ANSWERS = "skyrl_tinker.inference.vllm.plugin.packed_answers.PackedAnswers"
GUARD = "skyrl_tinker.inference.vllm.plugin.middlewares.TokenGuard"
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of the CPU attention kernels; another fails at the first forward, not at start."""
RESTRICTING_PARSERS = ("glm45", "glm47")
"""Parsers of tools with which vLLM restricts all chats with tools by a grammar, strict tools or not."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GPT_OSS: Mapping[str, Any] = {
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
_FIXED: Mapping[str, Mapping[str, Any]] = {"GptOssForCausalLM": _GPT_OSS}
"""Entries of config.json that vLLM does not read: values other than its own are refused."""


def flags(spec: SamplerSpec, port: int, host: str = LOOPBACK) -> list[str]:
    """Return the arguments of vLLM's API server, which listens on an IP address of its host."""
    arguments = {**_fixed(spec, port, host), **merged(_defaults(spec), spec.engine.arguments)}
    behind_guard = ("--middleware", VERSION_PULL, "--middleware", PACKED_ANSWERS)  # the last one comes first
    return [*behind_guard, *as_flags(arguments)]


def _fixed(spec: SamplerSpec, port: int, host: str) -> Arguments:
    """Return the arguments that `vllm_args` may not give."""
    names = [BASE_MODEL, *(name for name in spec.model.names if name != BASE_MODEL)]
    common: Arguments = {
        "model": spec.model.directory,
        "host": host,
        "port": port,
        "dtype": spec.dtype,
        "max-model-len": spec.max_model_len,
        "tensor-parallel-size": spec.tensor_parallel_size,
        "max-logprobs": -1,
        "logprobs-mode": f"{spec.sampled_logprobs}_logprobs",
        "generation-config": "vllm",
        # Where a repository holds Mistral's own files as well, vLLM would take those.
        "load-format": "hf",
        "config-format": "hf",
        "tokenizer-mode": "hf",
        "weight-transfer-config": {"backend": spec.weight_backend},
        "served-model-name": names,
        "enable-scale-out": True,
        "enable-prompt-tokens-details": True,
        "scheduling-policy": "priority",  # priorities of engine.scheduling.priorities
    }
    adapters: Arguments = {
        "enable-lora": True,
        "max-loras": spec.max_loras,
        "max-lora-rank": vllm_arguments.slot_rank(spec.max_lora_rank),
        "max-cpu-loras": spec.max_cpu_loras,
    }
    lora = adapters if spec.max_lora_rank else {}
    guard = {"middleware": GUARD} if spec.token else {}
    parser = {"reasoning-parser": spec.reasoning_parser} if spec.reasoning_parser else {}
    tools = (
        {"enable-auto-tool-choice": True, "tool-call-parser": spec.tool_parser} if spec.tool_parser else {}
    )
    experts = {"enable-return-routed-experts": True} if spec.router_replay else {}
    gpu = {} if spec.device == "cpu" else {"gpu-memory-utilization": spec.gpu_memory_utilization}
    sleep = {"enable-sleep-mode": True} if spec.shared_gpus and spec.device == "cuda" else {}
    return {**common, **lora, **guard, **parser, **tools, **experts, **gpu, **sleep}


def _defaults(spec: SamplerSpec) -> Arguments:
    common: Arguments = {
        "max-num-seqs": spec.most_sequences,
        "disable-uvicorn-access-log": True,
        # A dead engine core fails all requests with one exception, whose traceback grows with each log.
        "log-error-stack": False,
        # With auto, the first schema would choose for all: strict tools need this one.
        "structured-outputs-config": {"backend": "xgrammar"},
    }
    # Counting takes a few percent of a tiny model's time.
    kv_cache = kv_bytes(spec.model, spec.dtype)
    cpu = {"enforce-eager": True, "kv-cache-memory-bytes": kv_cache, "disable-log-stats": True}
    # Rounded to bfloat16, a logit of 30 would be off by up to 0.06; the trainer's is not rounded.
    head = {} if spec.dtype == "float32" else {"hf-overrides": {"head_dtype": "float32"}}
    return {**common, **head, **(cpu if spec.device == "cpu" else {})}


def visible_gpus(spec: SamplerSpec, replica: int) -> dict[str, str]:
    """Return the environment of a replica that shares GPUs with the trainer, as if Ray had assigned them.

    vLLM's sleeping allocator refuses PyTorch's expandable segments, which the trainer may use.
    """
    shared = spec.gpus_of(replica)
    if not shared:
        return {}
    visible = ",".join(gpu.index for gpu in shared)
    return {"CUDA_VISIBLE_DEVICES": visible, "PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ""}


def environment(
    spec: SamplerSpec, interface: str = "lo", inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of vLLM's API server, which meets the trainer over a network interface."""
    common = {
        ENABLED_BY: "1",
        "HF_HUB_OFFLINE": "1",  # the model is always a local directory
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the plugin's prompt_scores patches the first one
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_MAX_STOP_STRINGS": "1024",  # of its OpenAI routes, beyond our own limit; the default is 4
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # context + 1: the last token is sampled, never fed
        "GLOO_SOCKET_IFNAME": "lo",  # for workers on one host; else the address of its host name
        "NCCL_SOCKET_IFNAME": spec.network_interface or interface,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # the default 5 s races with pooled connections
    }
    cpu = {
        STARTING_NICER: str(START_NICENESS["cpu"]),
        # A single worker runs in the engine process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if spec.workers == 1 else "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",  # the first prompt logprobs would wait many seconds for a C++ compiler
    }
    # Handles of GPU memory arrive pickled, in requests with the token.
    ipc = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if spec.weight_backend == "ipc" else {}
    return {**inherited, **common, **ipc, TOKEN: spec.token, **(cpu if spec.device == "cpu" else {})}


def require_model(served: ModelToServe, arguments: Arguments) -> None:
    """Raise StartupError for a model that vLLM would serve wrongly, or not with these settings."""
    facts = served.facts
    if reason := _reason(facts.architecture, served.config):
        raise StartupError(f"{facts.architecture}: {reason}")
    if served.tool_parser in RESTRICTING_PARSERS:
        raise StartupError(
            f"tool_parser: found {served.tool_parser}, expected another: with it vLLM restricts all chats "
            "with tools by a grammar, and logprobs would be of another distribution"
        )
    if facts.experts and served.adapters and arguments.get("data-parallel-size", 1) != 1:
        raise StartupError(
            "vllm_args: data-parallel-size: expected 1 for a mixture of experts, whose ranks would compute "
            "each other's rows with whatever adapter they have in the slot of that number; use replicas, or "
            "max_lora_rank = 0, with which there are no adapters"
        )
    if served.router_replay:
        _check_router_replay(arguments)
    if served.device == "cpu" and facts.head_dim not in CPU_HEAD_DIMS:
        raise StartupError(
            f"head_dim {facts.head_dim} of {facts.directory} is not served by vLLM on CPU; "
            f"use a model whose head_dim is one of {', '.join(map(str, CPU_HEAD_DIMS))}"
        )


def _check_router_replay(arguments: Arguments) -> None:
    """Refuse features under which a sampler lists no experts."""
    if not arguments.get("enable-prefix-caching", True):
        raise StartupError(
            "vllm_args: enable-prefix-caching: found false, expected true with router_replay: vLLM keeps the "
            "experts of cached tokens beside its prefix cache"
        )
    if "speculative-config" in arguments:
        raise StartupError("vllm_args: speculative-config: expected none with router_replay")


def _reason(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Return the entry of config.json that the samplers would ignore. A missing entry has their default."""
    for name, value in _FIXED.get(architecture, {}).items():
        if config.get(name, value) != value:
            return f"{name}: expected {value}, found {config[name]!r}"
    match architecture:
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" if _mixed(config):
            return "vLLM serves a sliding window in all layers or in none, not in some"
        case "GptOssForCausalLM" if (kind := _rope_type(config)) != "yarn":
            return f"rope_type: expected yarn, found {kind}"
        case "GptOssForCausalLM" if not _alternates(config):
            turns = f"{_SLIDING} and {_FULL} in turns"
            return f"layer_types: expected {turns}, as vLLM has them whatever they say"
    return None


def _alternates(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types") or (_SLIDING, _FULL)
    return all(kind == (_SLIDING, _FULL)[layer % 2] for layer, kind in enumerate(kinds))


def _mixed(config: Mapping[str, Any]) -> bool:
    """Return whether some layers have a window and others have none, by the rules of Qwen's configuration."""
    kinds = set(config.get("layer_types") or ())
    if kinds or not config.get("use_sliding_window"):
        return len(kinds) > 1
    return 0 < int(config.get("max_window_layers", 28)) < int(config["num_hidden_layers"])


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type", "yarn"))


@dataclass(frozen=True)
class VllmProcess:
    arguments: Arguments = field(default_factory=dict)
    title = "vLLM"
    torch_groups = False
    abilities = SamplerAbilities("vLLM", lowest_temperature=0.01)  # below, vLLM silently samples at this one
    leftovers = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")  # left by tensor-parallel workers
    require_memory = staticmethod(require_memory)
    expert_slot_rank = staticmethod(vllm_arguments.expert_slot_rank)

    @property
    def dialect(self) -> "VllmDialect":
        from skyrl_tinker.inference.vllm.vllm_dialect import VLLM  # `serve` itself does without it

        return VLLM

    @property
    def cores(self) -> int:
        return int(self.arguments.get("data-parallel-size", 1))

    def check(self) -> None:
        vllm_arguments.check(self.arguments)

    def require_model(self, served: ModelToServe) -> None:
        require_model(served, self.arguments)

    def workers(self, tensor_parallel_size: int) -> int:
        return vllm_arguments.workers(self.arguments, tensor_parallel_size)

    def command(self, spec: SamplerSpec, port: int, host: str) -> list[str]:
        return [sys.executable, "-m", ENTRY, *flags(spec, port, host)]

    def environment(self, spec: SamplerSpec, replica: int, interface: str) -> dict[str, str]:
        return environment(spec, interface) | visible_gpus(spec, replica)
