"""PEFT's file format of a LoRA adapter: what checkpoints hold and the samplers load."""

from collections.abc import Mapping
from typing import Any

ALPHA = 32
"""The LoRA delta is scaled by ALPHA / rank."""

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
KEY_PREFIX = "base_model.model."


def adapter_config(shapes: Mapping[str, tuple[int, ...]], rank: int, base_model: str) -> dict[str, Any]:
    """Return adapter_config.json for tensors by name (`base_model.model.<module>.lora_A.weight`, …)."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in shapes}),
        **expert_patterns(expert_rank(shapes, rank), rank, ALPHA),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def expert_rank(shapes: Mapping[str, tuple[int, ...]], rank: int) -> int:
    """Return the rank of the experts' pairs, that of the adapter without such pairs."""
    ranks = (shape[0] for name, shape in shapes.items() if ".experts." in name and ".lora_A." in name)
    return next(ranks, rank)


def expert_patterns(rank: int, whole: int, alpha: float) -> dict[str, Any]:
    """Return what PEFT needs for experts of `rank` in an adapter of rank `whole`, with the same scale.

    PEFT applies an adapter of transformers' experts, whose gate and up projections are one tensor, to them
    with both pairs as one of twice the rank.
    """
    if rank == whole:
        return {}
    ranks = {r"experts\.\d+\.\w+": rank, r"experts\.gate_up_proj": 2 * rank, r"experts\.down_proj": rank}
    alphas = {pattern: alpha * each / whole for pattern, each in ranks.items()}
    return {"rank_pattern": ranks, "alpha_pattern": alphas}
