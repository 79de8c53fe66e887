"""Sliding windows of a base model: refused where the trainer, by transformers 5.19, would not have them."""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.errors import StartupError

FULL, SLIDING = "full_attention", "sliding_attention"


def require_served(architecture: str, config: Mapping[str, Any]) -> None:
    """Raise StartupError, with the reason, for windows that the trainer would not have."""
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
            return "the trainer's Llama has no sliding windows, which samplers would have"
        case "MistralForCausalLM" if windowed and FULL in kinds:
            return "the trainer's Mistral has its sliding window in all layers, whatever layer_types says"
        case "Qwen3MoeForCausalLM" if config.get("use_sliding_window"):
            return "sliding windows are not supported beside experts"
        case "Gemma3ForCausalLM" if config.get("use_bidirectional_attention"):
            return "use_bidirectional_attention is not supported: tokens are trained from those before them"
    return None
