"""Entries of config.json that vLLM 0.32 does not read: other values than its own are refused."""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.errors import StartupError

_GPT_OSS: Mapping[str, Any] = {
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
_FIXED: Mapping[str, Mapping[str, Any]] = {"GptOssForCausalLM": _GPT_OSS}


def require_served(architecture: str, config: Mapping[str, Any]) -> None:
    """Raise StartupError for a value that the samplers would not have. Without an entry it is their own."""
    if config.get("quantization_config"):
        raise StartupError(
            f"{architecture}: quantization_config: expected weights in bfloat16, float16 or float32, found "
            f"{config['quantization_config'].get('quant_method')}: they cannot be trained"
        )
    for name, value in _FIXED.get(architecture, {}).items():
        if config.get(name, value) != value:
            raise StartupError(f"{architecture}: {name}: expected {value}, found {config[name]!r}")
    if architecture == "GptOssForCausalLM" and (kind := _rope_type(config)) != "yarn":
        raise StartupError(f"{architecture}: rope_type: expected yarn, found {kind}")


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type", "yarn"))
