"""PEFT's file format of a LoRA adapter, in checkpoints and for the samplers."""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec

ALPHA = 32
"""The LoRA delta is scaled by ALPHA / rank."""

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MERGING_FILE = "MERGING.md"
"""Beside an adapter that `merges_wrongly`. A README.md would take the place of the SDK's, for the hub."""
MERGING_NOTE = """# Do not merge this adapter into its base model

It adapts the head, which this base model ties to its embeddings: PEFT's `merge_and_unload` writes the head's
change into the embeddings, too, and the result is another model. Use the adapter unmerged:
`PeftModel.from_pretrained(base, adapter)`.
"""
KEY_PREFIX = "base_model.model."
WHOLE_EXPERTS = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Suffix to the name of a mixture whose adapter has the pairs of all experts in one tensor for A and B."""
EXPERT_PARAMETERS = [f"mlp.experts.{matrix}" for matrix in WHOLE_EXPERTS]
"""Parameters of such a mixture, as target_parameters names them."""


def adapter_config(
    shapes: Mapping[str, tuple[int, ...]], rank: int, base_model: str, inner: int
) -> dict[str, Any]:
    """Return adapter_config.json for tensors by name (`base_model.model.<module>.lora_A.weight`, …).

    `inner`: rank of the experts' pairs, that of the adapter without such pairs.
    """
    whole = any(is_whole(name) for name in shapes)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in shapes if not is_whole(name)}),
        **expert_patterns(inner, rank, ALPHA, whole),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def merges_wrongly(spec: LoraSpec, facts: BaseModelFacts) -> bool:
    """Return whether the adapter changes a head that is tied to the embeddings."""
    return spec.rank > 0 and spec.train_unembed and facts.tied


def is_whole(name: str) -> bool:
    """Return whether a tensor has the pairs of all experts."""
    return name.split(".lora_")[0].endswith(tuple(f".experts{end}" for end in WHOLE_EXPERTS.values()))


def expert_rank(shapes: Mapping[str, tuple[int, ...]], rank: int) -> int:
    """Return the rank of the pairs of single experts, that of the adapter without such pairs."""
    ranks = (shape[0] for name, shape in shapes.items() if ".experts." in name and ".lora_A." in name)
    return next(ranks, rank)


def expert_patterns(rank: int, adapter: int, alpha: float, whole: bool) -> dict[str, Any]:
    """Return PEFT's settings for experts of `rank` in an adapter of rank `adapter`, with the same scale.

    PEFT applies an adapter of transformers' experts, whose gate and up projections are one tensor, to them
    with both pairs as one of twice the rank. `whole`: there is one pair for both.
    """
    targets: dict[str, Any] = {"target_parameters": EXPERT_PARAMETERS} if whole else {}
    if rank == adapter:
        return targets
    ranks = {} if whole else {r"experts\.\d+\.\w+": rank}
    ranks |= {r"experts\.gate_up_proj": (1 if whole else 2) * rank, r"experts\.down_proj": rank}
    alphas = {pattern: alpha * each / adapter for pattern, each in ranks.items()}
    return {**targets, "rank_pattern": ranks, "alpha_pattern": alphas}
