"""LoRA shape and optimizer family of a new model."""

import secrets
from collections.abc import Mapping
from typing import Any

from skyrl_tinker.domain.samples import SEEDS
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.schemas.training import LoraConfig
from skyrl_tinker.protocol.validation.limits import Limits

_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {"adamw": {}, "dimuon": {"version": 1}}
"""By family: the keys of optimizer_config beside `type`, each with the one supported value."""
_GROUPS = ("train_mlp", "train_attn", "train_unembed")


def validate_lora_config(config: LoraConfig | None, limits: Limits) -> LoraSpec:
    """Return the LoRA spec. An absent seed is drawn here, once; any other is reduced to 63 bits."""
    if config is None:
        raise UserError("lora_config is missing: send a rank, where 0 means full-parameter training")
    if not 0 <= config.rank <= limits.max_lora_rank:
        raise UserError(
            f"lora_config.rank is {config.rank}, expected 0 (full-parameter training) to "
            f"{limits.max_lora_rank} (the setting max_lora_rank of base model {limits.base_model})"
        )
    left_out = [name for name in _GROUPS if not getattr(config, name)]
    if len(left_out) == len(_GROUPS):
        raise UserError(f"lora_config trains nothing: set one of {', '.join(_GROUPS)}")
    if config.rank == 0 and left_out:
        raise UserError(
            f"lora_config.{left_out[0]} is false, expected true with rank 0: full-parameter training leaves "
            "nothing out"
        )
    seed = secrets.randbelow(SEEDS) if config.seed is None else config.seed % SEEDS
    return LoraSpec(config.rank, seed, config.train_mlp, config.train_attn, config.train_unembed)


def validate_optimizer_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the config with all its keys. Absent means AdamW."""
    given = {} if config is None else config
    family = given.get("type", "adamw")
    if not isinstance(family, str) or family not in _OPTIMIZERS:
        raise NotSupportedError(
            f"optimizer_config.type is {shorten(family)}, expected one of {', '.join(_OPTIMIZERS)}"
        )
    complete = {"type": family, **_OPTIMIZERS[family]}
    unknown = sorted(set(given) - set(complete))
    if unknown:
        raise UserError(
            f"optimizer_config has the unknown key {shorten(unknown[0])}, "
            f"for {family} expected {', '.join(complete)}"
        )
    for key, expected in complete.items():
        if given.get(key, expected) != expected:
            raise NotSupportedError(f"optimizer_config.{key} is {shorten(given[key])}, expected {expected!r}")
    return complete
