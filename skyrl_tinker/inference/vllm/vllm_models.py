"""Base models that vLLM 0.32 and 0.33 would serve wrongly, or not with these settings, and the reasons."""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.servers.replica_spec import Arguments, ModelToServe

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


def require_model(served: ModelToServe, arguments: Arguments) -> None:
    """Raise StartupError with the necessary change."""
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
