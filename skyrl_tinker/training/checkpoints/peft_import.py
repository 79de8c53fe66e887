"""Import of LoRA adapters saved by PEFT: models of ours that compute the same."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_tinker.domain.peft_config import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    ALPHA,
    EXPERT_PARAMETERS,
    KEY_PREFIX,
    expert_patterns,
    expert_rank,
)
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.domain.weight_files import weight_files
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.models.lora import ATTENTION, AdaptedLayer, LoraModel, find_targets
from skyrl_tinker.training.models.trainable_model import Part

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_SEED = 0
"""Seed of the A matrices that an adapter lacks."""

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "target_modules",
        "use_rslora",
    }
)
"""Keys of adapter_config.json that say how an adapter was made, or that are handled here. Any other key must
be empty: its feature (DoRA, ranks by layer, retrained embeddings, …) is not converted."""

_NEUTRAL: Mapping[str, Any] = {"bias": "none", "task_type": "CAUSAL_LM"}
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base as it is. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it."""


@dataclass(frozen=True, slots=True)
class ForeignAdapter:
    """Tensors of a PEFT adapter.

    `tensors`: the LoRA pairs by key, float32; B times `factor` fits our scale of ALPHA / rank. `others`: the
    rest of the file, unchanged: PEFT stores a copy of the base's head beside an adapted head.
    """

    rank: int
    factor: float
    tensors: Mapping[str, torch.Tensor]
    others: Mapping[str, torch.Tensor]


def read_foreign(directory: Path) -> ForeignAdapter:
    """Read an adapter. Raises UserError when it is not LoRA, or a kind that plain LoRA cannot reproduce."""
    config = _read_config(directory / ADAPTER_CONFIG_FILE)
    rank, alpha = _number(config, "r"), _number(config, "lora_alpha")
    if rank != int(rank):
        raise UserError(f"{ADAPTER_CONFIG_FILE}: r is {rank}, expected a whole number")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = _read_tensors(directory / ADAPTER_FILE)
    pairs = {key: _checked(key, tensor) for key, tensor in tensors.items() if _module(key) is not None}
    parameters = config.get("target_parameters")
    whole = isinstance(parameters, list) and sorted(map(str, parameters)) == sorted(EXPERT_PARAMETERS)
    shapes = {key: tuple(tensor.shape) for key, tensor in pairs.items()}
    inner = _stated_rank(config, int(rank)) if whole else expert_rank(shapes, int(rank))
    # of experts with a rank of their own PEFT takes the root of that, so one factor would not fit all layers
    patterns = {} if config.get("use_rslora") else expert_patterns(inner, int(rank), alpha, whole)
    if whole:  # PEFT sorts them itself
        patterns["target_parameters"] = parameters
    _require_plain(config, patterns)
    others = {key: tensor for key, tensor in tensors.items() if key not in pairs}
    return ForeignAdapter(int(rank), scale / (ALPHA / rank), pairs, others)


def base_targets(directory: str) -> tuple[AdaptedLayer, ...]:
    """Return the layers of a base model that can be adapted, from its config alone."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        causal_lm: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return find_targets(causal_lm, causal_lm.get_output_embeddings())


def convert(adapter: ForeignAdapter, base_model: str) -> LoraModel:
    """Return a model of ours with the same deltas to the base model in that directory.

    We adapt layers by groups (attention, MLP, head): a layer of a group that the adapter leaves out gets a
    fresh A and a zero B, hence a zero delta.

    Raises UserError naming the tensor that fits no layer.
    """
    targets = base_targets(base_model)
    model = LoraModel(_spec(adapter, targets), targets, torch.device("cpu"))
    for key, tensor in adapter.others.items():
        _require_copy(key, tensor, Path(base_model))
    shapes = model.shapes()
    for key, tensor in adapter.tensors.items():
        _require_fit(adapter, key, shapes)
        model.write(Part.WEIGHT, key, _scaled(key, tensor, adapter.factor) if _is_b(key) else tensor)
    return model


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: expected a PEFT adapter's JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _require_plain(config: Mapping[str, Any], patterns: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{ADAPTER_CONFIG_FILE}: peft_type is {config.get('peft_type')!r}, expected 'LORA'")
    if config.get("init_lora_weights") not in _INITS:
        raise UserError(
            f"{ADAPTER_CONFIG_FILE}: init_lora_weights is {config['init_lora_weights']!r}, which changes the "
            "base as well: have PEFT convert it when it is saved (path_initial_model_for_weight_conversion)"
        )
    # Patterns come last: they do not name the kind of adapter that is not converted.
    for key in sorted(config.keys() - _HARMLESS, key=lambda key: (key.endswith("_pattern"), key)):
        value, neutral = config[key], patterns.get(key, _NEUTRAL.get(key))
        if value and value != neutral:
            expected = "nothing" if neutral is None else repr(neutral)
            raise UserError(f"{ADAPTER_CONFIG_FILE}: {key} is {value!r}, expected {expected}: not plain LoRA")


def _stated_rank(config: Mapping[str, Any], rank: int) -> int:
    """Return the rank of one expert's pair, from rank_pattern: the tensors stack the pairs of all experts."""
    ranks = {value for key, value in (config.get("rank_pattern") or {}).items() if "experts" in key}
    return int(ranks.pop()) if len(ranks) == 1 else rank


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{ADAPTER_CONFIG_FILE}: {key} is {value!r}, expected a positive number")
    return value


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: expected safetensors ({error})") from error


def _checked(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as float32. Raises UserError for a dtype not in _DTYPES or values not finite."""
    if tensor.dtype not in _DTYPES:
        expected = ", ".join(map(str, _DTYPES))
        raise UserError(f"{ADAPTER_FILE}: {key} has dtype {tensor.dtype}, expected one of {expected}")
    if not tensor.isfinite().all():
        raise UserError(f"{ADAPTER_FILE}: {key} has values that are not finite")
    return tensor.float()


def _scaled(key: str, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    scaled = tensor * factor
    if not scaled.isfinite().all():
        raise UserError(
            f"{ADAPTER_FILE}: {key} times {factor:g}, which fits lora_alpha to ours, is beyond float32"
        )
    return scaled


def _spec(adapter: ForeignAdapter, targets: tuple[AdaptedLayer, ...]) -> LoraSpec:
    """Return the spec whose groups are those with at least one adapted layer."""
    modules = {module for key in adapter.tensors if (module := _module(key))}
    adapted = [target for target in targets if not modules.isdisjoint(target.modules)]
    unknown = sorted(modules.difference(*(target.modules for target in targets)))
    if unknown or not adapted:
        found = unknown[0] if unknown else "no tensors"
        leaves = ", ".join(sorted({target.leaf for target in targets}))
        raise UserError(f"{ADAPTER_FILE}: found {found}, expected LoRA pairs of the base model's {leaves}")
    layers = {target.leaf for target in adapted}
    return LoraSpec(
        adapter.rank,
        _SEED,
        train_mlp=any(target.in_mlp for target in adapted),
        train_attn=bool(layers & ATTENTION),
        train_unembed=any(target.is_head for target in adapted),
    )


def _module(key: str) -> str | None:
    """Return the layer that a tensor belongs to, or None when it is not part of a LoRA pair."""
    for end in (".lora_A.weight", ".lora_B.weight"):
        if key.startswith(KEY_PREFIX) and key.endswith(end):
            return key.removeprefix(KEY_PREFIX).removesuffix(end)
    return None


def _is_b(key: str) -> bool:
    return key.endswith(".lora_B.weight")


def _require_fit(adapter: ForeignAdapter, key: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = tuple(adapter.tensors[key].shape)
    if found != shapes[key]:
        raise UserError(f"{ADAPTER_FILE}: {key} has shape {found}, the base model expects {shapes[key]}")
    other = key.replace(".lora_B.", ".lora_A.") if _is_b(key) else key.replace(".lora_A.", ".lora_B.")
    if other not in adapter.tensors:
        raise UserError(f"{ADAPTER_FILE}: found {key} without {other}, expected both of a pair")


def _require_copy(key: str, tensor: torch.Tensor, base_model: Path) -> None:
    """Raise UserError unless a tensor outside the LoRA pairs equals the base model's."""
    name = key.removeprefix(KEY_PREFIX).replace(".base_layer.", ".")
    base = _base_tensor(base_model, name)
    if base is None and name in _TIED:
        base = _base_tensor(base_model, _TIED[name])
    if base is None or not torch.equal(base.to(tensor.dtype), tensor):
        raise UserError(f"{ADAPTER_FILE}: found {key}, expected LoRA pairs and copies of the base's tensors")


def _base_tensor(base_model: Path, name: str) -> torch.Tensor | None:
    for path in weight_files(base_model):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None
