"""Base models with random weights, and requests for them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.loss_specs import CUSTOM
from skyrl_tinker.domain.values import CustomLoss, Datum, PassItem, ReplayedExperts
from skyrl_tinker.server.base_models.tiny_families import EXPERTS, FAMILIES
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.worker import Worker

_HEAD_SIZES = {"gemma3": 256, "gpt-oss": 64, "llama": 64, "qwen2": 64, "granite": 64}
"""Those of the families' published models; of the others 128."""


def _family_config(name: str) -> PreTrainedConfig:
    family, head_size = FAMILIES[name], _HEAD_SIZES.get(name, 128)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 512,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_size,
        "tie_word_embeddings": not family.untied,
        "initializer_range": 0.05,
        "max_position_embeddings": 4096,
        family.activation: family.gate,
    }
    if family.layer_types:
        sizes["layer_types"] = list(family.layer_types)
    config: PreTrainedConfig = AutoConfig.for_model(family.model_type, **sizes | dict(family.config))
    return config


CONFIGS: Mapping[str, PreTrainedConfig] = {
    name: Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_size,
        tie_word_embeddings=name == "tiny",
        initializer_range=deviation,
        max_position_embeddings=1 << 16,
    )
    for name, hidden, layers, intermediate, vocab, heads, key_heads, head_size, deviation in (
        ("tiny", 192, 2, 512, 512, 6, 2, 32, 0.05),
        ("untied", 64, 2, 128, 512, 4, 2, 32, 0.1),
        ("30M", 384, 8, 1536, 32_000, 6, 2, 64, 0.02),  # larger weights make much of bfloat16's rounding
        ("2B", 2048, 24, 6144, 151_936, 16, 8, 128, 0.02),
        ("8B", 4096, 36, 12_288, 151_936, 32, 8, 128, 0.02),  # the shape of Qwen3-8B
    )
} | {name: _family_config(name) for name in FAMILIES}
_SPREAD = 0.02


def _node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}


_CUSTOM = CustomLoss(
    "f",
    (("logprobs", 1), ("weights", 1)),
    (
        _node("placeholder", "logprobs", "logprobs"),
        _node("placeholder", "weights", "weights"),
        _node("call_function", "mul", "operator.mul", {"ref": "logprobs"}, {"ref": "weights"}),
        _node("call_method", "sum_1", "sum", {"ref": "mul"}),
        _node("call_function", "neg", "operator.neg", {"ref": "sum_1"}),
        _node("output", "output", "output", {"tuple": [{"ref": "neg"}, {"dict": {}}]}),
    ),
)
"""-(logprobs * weights).sum(), as the SDK sends it."""


def make_base(name: str, **options: Any) -> Any:
    """Make a causal LM on torch's default device."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], **options)  # type: ignore[no-untyped-call]


def write_base(name: str, directory: str) -> None:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    make_base(name, dtype=torch.float32).save_pretrained(directory)


def make_data(
    lengths: tuple[int, ...], vocab: int, seed: int, candidates: int = 0, *, replay: bool = False
) -> tuple[Datum, ...]:
    """Make data with the inputs of all losses, of both signs and with zeros.

    `replay`: with the experts for each token, of a mixture of FAMILIES.
    """
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length, candidates) if candidates else (length,)
        logprobs = rng.normal(-np.log(vocab), 0.5, shape)
        arrays = {
            "weights": rng.integers(-1, 3, shape),
            "advantages": rng.integers(-2, 3, shape),
            "logprobs": logprobs,
            "sampling_logprobs": logprobs,
            "sampled": rng.integers(0, 5, shape) > 0,
            "sequence_ratio_mask": rng.integers(0, 5, shape) > 0,
        }
        inputs = {name: array.astype(np.float32) for name, array in arrays.items()}
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        replayed = _experts(rng, length) if replay else None
        targets = rng.integers(0, vocab, shape)
        data.append(Datum(tokens, targets, inputs, replayed=replayed))
    return tuple(data)


def _experts(rng: np.random.Generator, length: int) -> ReplayedExperts:
    """Choose two for each layer and token, never the last one: it gets no token."""
    scores = rng.random((length, 2, EXPERTS - 1))
    return ReplayedExperts(scores.argsort(-1)[..., :2].astype(np.uint8), np.ones(length, np.bool_))


def make_item(
    key: ModelKey, data: tuple[Datum, ...], loss_fn: str = "cross_entropy", *, backward: bool = True
) -> PassItem:
    custom = _CUSTOM if loss_fn == CUSTOM else None
    return PassItem(RequestId(f"r{key}"), key, data, loss_fn, {}, backward, custom=custom)


def spread_b(worker: Worker, key: ModelKey) -> None:
    """Give B of an adapter, which starts with zeros, random values, so that gradients reach A."""
    model = worker._models[key]
    generator = torch.Generator().manual_seed(int(key))
    for name, shape in model.shapes().items():
        if name.endswith("lora_B.weight"):
            model.write(Part.WEIGHT, name, torch.randn(shape, generator=generator) * _SPREAD)
