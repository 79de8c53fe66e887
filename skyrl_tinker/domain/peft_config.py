"""PEFT's file format of a LoRA adapter: what checkpoints hold and the samplers load."""

from collections.abc import Iterable
from typing import Any

ALPHA = 32
"""The LoRA delta is scaled by ALPHA / rank."""

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
KEY_PREFIX = "base_model.model."


def adapter_config(names: Iterable[str], rank: int, base_model: str) -> dict[str, Any]:
    """Return adapter_config.json for tensor names (`base_model.model.<module>.lora_A.weight`, …)."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in names}),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
