"""Base models with random weights, and requests for them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import Datum, PassItem
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.worker import Worker

CONFIGS: Mapping[str, Qwen3Config] = {
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
}
_SPREAD = 0.02


def make_base(name: str, **options: Any) -> Any:
    """Make a causal LM on torch's default device."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], **options)  # type: ignore[no-untyped-call]


def write_base(name: str, directory: str) -> None:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    make_base(name, dtype=torch.float32).save_pretrained(directory)


def make_data(lengths: tuple[int, ...], vocab: int, seed: int, candidates: int = 0) -> tuple[Datum, ...]:
    """Make data with inputs for cross_entropy and importance_sampling, of both signs and with zeros."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length, candidates) if candidates else (length,)
        arrays = {
            "weights": rng.integers(-1, 3, shape),
            "advantages": rng.integers(-2, 3, shape),
            "logprobs": rng.normal(-np.log(vocab), 0.5, shape),
        }
        inputs = {name: array.astype(np.float32) for name, array in arrays.items()}
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        data.append(Datum(tokens, rng.integers(0, vocab, shape), inputs))
    return tuple(data)


def make_item(
    key: ModelKey, data: tuple[Datum, ...], loss_fn: str = "cross_entropy", *, backward: bool = True
) -> PassItem:
    return PassItem(RequestId(f"r{key}"), key, data, loss_fn, {}, backward)


def spread_b(worker: Worker, key: ModelKey) -> None:
    """Give B of an adapter, which starts with zeros, random values, so that gradients reach A."""
    model = worker._models[key]
    generator = torch.Generator().manual_seed(int(key))
    for name, shape in model.shapes().items():
        if name.endswith("lora_B.weight"):
            model.write(Part.WEIGHT, name, torch.randn(shape, generator=generator) * _SPREAD)
