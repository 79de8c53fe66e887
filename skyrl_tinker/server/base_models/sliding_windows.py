"""Sliding windows of a base model: refused where trainer and samplers would not both do as config.json says.

What each does is read from transformers 5.19 and vLLM 0.32.
"""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.errors import StartupError

FULL, SLIDING = "full_attention", "sliding_attention"


def require_served(architecture: str, config: Mapping[str, Any]) -> None:
    """Raise StartupError, with the reason, for windows that trainer and samplers would not both have."""
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise StartupError(
            f"config.json: sliding_window must be a positive integer or null, found {window!r}"
        )
    windowed = window is not None and window < config["max_position_embeddings"]
    if reason := _reason(architecture, config, windowed):
        raise StartupError(f"{architecture}: {reason}")


def _reason(architecture: str, config: Mapping[str, Any], windowed: bool) -> str | None:
    kinds = set(config.get("layer_types") or ())
    if others := kinds - {FULL, SLIDING}:
        return f"layer_types {', '.join(sorted(others))} are not supported; supported: {FULL}, {SLIDING}"
    match architecture:
        case "LlamaForCausalLM" if windowed:
            return "the trainer's Llama has no sliding windows, which vLLM's would have"
        case "MistralForCausalLM" if windowed and FULL in kinds:
            return "the trainer's Mistral has its sliding window in all layers, whatever layer_types says"
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" if _mixed(config, kinds):
            return "vLLM serves a sliding window in all layers or in none, not in some"
        case "Qwen3MoeForCausalLM" if config.get("use_sliding_window"):
            return "sliding windows are not supported beside experts"
        case "GptOssForCausalLM" if not _alternates(config):
            return f"layer_types: expected {SLIDING} and {FULL} in turns, as vLLM has them whatever they say"
        case "Gemma3ForCausalLM" if config.get("use_bidirectional_attention"):
            return "use_bidirectional_attention is not supported: tokens are trained from those before them"
    return None


def _alternates(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types") or (SLIDING, FULL)
    return all(kind == (SLIDING, FULL)[layer % 2] for layer, kind in enumerate(kinds))


def _mixed(config: Mapping[str, Any], kinds: set[str]) -> bool:
    """Return whether some layers have a window and others have none, by the rules of Qwen's configuration."""
    if kinds or not config.get("use_sliding_window"):
        return len(kinds) > 1
    return 0 < int(config.get("max_window_layers", 28)) < int(config["num_hidden_layers"])
