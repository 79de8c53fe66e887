"""Base model: find or make it and read its facts. Imports no transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.domain.weight_files import listed_weights
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.sampling_engine import engine_of
from skyrl_tinker.inference.servers.replica_spec import ModelToServe
from skyrl_tinker.server.base_models import hub, sliding_windows, tiny_model

DEFAULT_CONTEXT = 4096
TINY = "tiny"
"""Base model that is made on first use."""
ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Gemma3ForCausalLM",
    "Olmo3ForCausalLM",
    "GraniteForCausalLM",
    "GptOssForCausalLM",
)
MIXTURES = frozenset({"Qwen3MoeForCausalLM", "GptOssForCausalLM"})
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
REPLAYED = frozenset({"Qwen3MoeForCausalLM"})
"""Architectures whose routers can be replayed."""


def resolve(settings: Settings) -> BaseModelFacts:
    """Find (or make) the base model, of a hub's its description, and read its facts.

    Raises StartupError, with the setting to change, when there is no such model or it cannot be served.
    """
    _, facts = read_config(settings)
    if facts.hub_name is None:
        listed_weights(Path(facts.directory))  # cut ones let only their own base model fail
    _check_workers(settings.tensor_parallel_size, facts)
    return facts


def read_config(settings: Settings) -> tuple[Mapping[str, Any], BaseModelFacts]:
    """Read config.json, of a hub's model without its weights, and the facts; raises as `resolve` does."""
    local = _directory(settings)
    directory = hub.fetch_description(settings.base_model) if local is None else local
    config = _read_json(directory / "config.json")
    try:
        facts = _facts(settings, directory, config, None if local else settings.base_model)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(
            f"config.json or generation_config.json in {directory} is damaged: {error!r}"
        ) from error
    for name in _TOKENIZER:
        if (directory / name).is_file():
            _read_json(directory / name)
    if quantization := config.get("quantization_config"):
        raise StartupError(
            f"{facts.architecture}: quantization_config: expected weights in bfloat16, float16 or float32, "
            f"found {quantization.get('quant_method')}: they cannot be trained"
        )
    sliding_windows.require_served(facts.architecture, config)
    if settings.router_replay and facts.architecture not in REPLAYED:
        raise StartupError(
            f"router_replay: expected {', '.join(REPLAYED)}, found {facts.architecture} in {facts.directory}"
        )
    if facts.sampleable:
        _require_sampler(settings, config, facts)
    return config, facts


def _require_sampler(settings: Settings, config: Mapping[str, Any], facts: BaseModelFacts) -> None:
    engine_of(settings).require_model(
        ModelToServe(
            facts,
            config,
            settings.device,
            adapters=settings.max_lora_rank > 0,
            router_replay=settings.router_replay,
            tool_parser=settings.tool_parser,
        )
    )


def _check_workers(count: int, facts: BaseModelFacts) -> None:
    """Refuse heads that the workers of a replica cannot share: they would die of an assertion."""
    few, many = sorted((count, facts.num_kv_heads))
    if facts.num_heads % count or many % few:
        raise StartupError(
            f"tensor_parallel_size {count}: expected a divisor of the {facts.num_heads} attention heads and "
            f"a divisor or multiple of the {facts.num_kv_heads} key-value heads of {facts.directory}"
        )


def _directory(settings: Settings) -> Path | None:
    """Return the model's directory, None for a name of the hub."""
    given = Path(settings.base_model).expanduser()
    if settings.base_model == TINY:
        tiny = Directories(settings).models_dir / TINY
        if not (tiny / "config.json").is_file():
            tiny_model.make_model(tiny)
        return tiny.resolve()
    if (given / "config.json").is_file():
        return given.resolve()
    if given.is_absolute() or given.exists() or settings.base_model.startswith("."):
        lacks = "no config.json in that directory" if given.is_dir() else "no such directory"
        raise StartupError(f"--base-model {settings.base_model}: {lacks}")
    return None


def _facts(
    settings: Settings, directory: Path, config: Mapping[str, Any], hub_name: str | None
) -> BaseModelFacts:
    return BaseModelFacts(
        directory=str(directory),
        names=_names(settings, directory),
        architecture=_architecture(config),
        vocab_size=_positive(config, "vocab_size"),
        context_length=_context_length(settings, config),
        num_layers=_positive(config, "num_hidden_layers"),
        num_kv_heads=int(config.get("num_key_value_heads") or _positive(config, "num_attention_heads")),
        head_dim=int(
            config.get("head_dim") or config["hidden_size"] // _positive(config, "num_attention_heads")
        ),
        hidden_size=_positive(config, "hidden_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(directory, config),
        given=settings.base_model,
        hub_name=hub_name,
        num_heads=_positive(config, "num_attention_heads"),
        sampler=engine_of(settings).abilities,
        sampleable=settings.samples,
        **_mlp(config),
    )


def _mlp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the facts of MLPs, or of experts in all layers."""
    if _architecture(config) not in MIXTURES:
        return {"intermediate_size": _positive(config, "intermediate_size")}
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise StartupError(
            "config.json: expected experts in all layers (mlp_only_layers, decoder_sparse_step)"
        )
    whole = _architecture(config) == "GptOssForCausalLM"
    return {
        "intermediate_size": _positive(config, "intermediate_size" if whole else "moe_intermediate_size"),
        "one_pair_for_gate_and_up": whole,
        "experts": _positive(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        "experts_per_token": _positive(config, "num_experts_per_tok"),
    }


def _names(settings: Settings, directory: Path) -> tuple[str, ...]:
    """Return the canonical name first, then the model as given and its directory, without duplicates."""
    names = (settings.model_name or settings.base_model, settings.base_model, str(directory))
    return tuple(dict.fromkeys(names))


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or ["none"]
    if architectures[0] not in ARCHITECTURES:
        raise StartupError(
            f"architecture {architectures[0]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return str(architectures[0])


def _context_length(settings: Settings, config: Mapping[str, Any]) -> int:
    positions = _positive(config, "max_position_embeddings")
    length = settings.context_length or min(positions, DEFAULT_CONTEXT)
    if length > positions:
        raise StartupError(
            f"context_length is {length}, expected at most {positions}: the model has no more positions"
        )
    return length


def _eos(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return all end-of-sequence ids of generation_config.json, else of config.json."""
    generation = directory / "generation_config.json"
    sources = [_read_json(generation)] if generation.is_file() else []
    for source in (*sources, config):
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # no JSON, or no UTF-8
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} does not hold a JSON object")
    return content
