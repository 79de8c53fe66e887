"""Small untrained model with its own byte-level BPE tokenizer: a base model without a download."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from skyrl_tinker.errors import StartupError
from skyrl_tinker.server.base_models.tiny_families import Family, find_family

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
_SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)
_INIT_STD = 0.02  # initializer_range of all families

# Qwen's split: words with their leading space, single digits, punctuation, line breaks, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_TEXT = """
You are a helpful assistant. The user asks a question and the assistant gives the answer.
What is the sum of these numbers? The answer is the number that comes after the equals sign.
A policy is a model that takes an action in a state. It gets a reward when the action is right, and it learns
from the difference between the reward and the mean reward of the group. After some steps the reward rises.
The quick brown fox jumps over the lazy dog. Every good thing takes time, and little by little we learn what
works. First think about the question, then write the answer in one word. Please say which letter comes next.
Add the first number to the second number, or take the second from the first. Write the result and stop there.
There was a small house near the river where an old man and his daughter lived with their two cats. In the
morning they would open the window and listen to the birds. One day a stranger came along the road and asked
them for water and bread. They gave him what they had, and he told them stories of the places he had seen.
Language models read text as tokens. A token is a short piece of text: a word, a part of a word, a digit or a
sign. With every step the weights change a little, so that tokens with a good result become more likely.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Family and dimensions of the model; head size 32, the smallest that samplers take on a CPU."""

    family: Family
    hidden: int
    layers: int
    vocab: int
    tied: bool
    head_dim: int = 32

    def __post_init__(self) -> None:
        if self.hidden < 64 or self.hidden % 64:
            raise StartupError(f"--hidden must be a positive multiple of 64, found {self.hidden}")
        if self.layers < 1:
            raise StartupError(f"--layers must be at least 1, found {self.layers}")
        if self.vocab < _SMALLEST_VOCAB:
            raise StartupError(f"--vocab must be at least {_SMALLEST_VOCAB}, found {self.vocab}")

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.heads // 2

    @property
    def intermediate(self) -> int:
        return 3 * self.hidden


def make_model(
    directory: Path,
    *,
    arch: str = "qwen3",
    hidden: int = 192,
    layers: int = 2,
    vocab: int = 512,
    tied: bool = True,
    seed: int = 0,
) -> None:
    """Write config, weights and tokenizer to `directory`; the same arguments give the same bytes.

    About 1M parameters by default. config.json comes last, so that a directory that has one is complete.
    Raises StartupError for an unknown family and impossible sizes.
    """
    family = find_family(arch)
    shape = Shape(family=family, hidden=hidden, layers=layers, vocab=vocab, tied=tied and not family.untied)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(vocab)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    save_file(dict(_weights(shape, seed)), directory / "model.safetensors", metadata={"format": "pt"})
    vocabulary = tokenizer.get_vocab()
    eos = [vocabulary[IM_END], vocabulary[END_OF_TEXT]]
    _write_json(directory / "generation_config.json", {"do_sample": True, "eos_token_id": eos})
    _write_json(directory / "config.json", _config(shape, eos))


def make_tokenizer(vocab: int) -> Tokenizer:
    """Train a tokenizer: 256 bytes, the special tokens, and as many merges as `vocab` and the text allow."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    return tokenizer


def _weights(shape: Shape, seed: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield weights by Hugging Face's names: norms that change nothing, all else normal(0, 0.02)."""
    generator = np.random.default_rng(seed)

    def matrix(*size: int) -> npt.NDArray[np.float32]:
        return generator.normal(0.0, _INIT_STD, size).astype(np.float32)

    def norm(size: int) -> npt.NDArray[np.float32]:
        return np.full(size, shape.family.plain_norm, np.float32)

    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in _projections(shape):
            yield f"{prefix}.{name}.weight", matrix(rows, columns)
            if name.endswith(_biased(shape.family)):
                yield f"{prefix}.{name}.bias", matrix(rows)
        for name, sizes in _others(shape):
            yield f"{prefix}.{name}", matrix(*sizes)
        for name, size in _norms(shape):
            yield f"{prefix}.{name}.weight", norm(size)
    yield "model.norm.weight", norm(shape.hidden)
    if not shape.tied:
        yield "lm_head.weight", matrix(shape.vocab, shape.hidden)


def _projections(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Yield (name, outputs, inputs) of a layer's matrices."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "self_attn.q_proj", query, shape.hidden
    yield "self_attn.k_proj", key_value, shape.hidden
    yield "self_attn.v_proj", key_value, shape.hidden
    yield "self_attn.o_proj", shape.hidden, query
    experts = shape.family.experts
    if shape.family.whole_experts:
        yield "mlp.router", experts, shape.hidden
        return
    if experts:
        yield "mlp.gate", experts, shape.hidden
    inner = shape.family.config.get("moe_intermediate_size", shape.intermediate)
    for mlp in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        yield f"{mlp}.gate_proj", inner, shape.hidden
        yield f"{mlp}.up_proj", inner, shape.hidden
        yield f"{mlp}.down_proj", shape.hidden, inner


def _biased(family: Family) -> tuple[str, ...]:
    queries = ("q_proj", "k_proj", "v_proj") if family.query_biases else ()
    outputs = ("o_proj",) if family.output_biases else ()
    return (*queries, *outputs, *(("router",) if family.whole_experts else ()))


def _others(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, size) of a layer's tensors that are neither a matrix with its bias nor a norm."""
    if shape.family.sinks:
        yield "self_attn.sinks", (shape.heads,)
    if shape.family.whole_experts:
        experts, hidden, inner = shape.family.experts, shape.hidden, shape.family.config["intermediate_size"]
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
        yield "mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
        yield "mlp.experts.down_proj", (experts, inner, hidden)
        yield "mlp.experts.down_proj_bias", (experts, hidden)


def _norms(shape: Shape) -> Iterator[tuple[str, int]]:
    for name in shape.family.layer_norms:
        yield name, shape.hidden
    if shape.family.head_norms:
        yield "self_attn.q_norm", shape.head_dim
        yield "self_attn.k_norm", shape.head_dim
    if shape.family.wide_norms:
        yield "self_attn.q_norm", shape.heads * shape.head_dim
        yield "self_attn.k_norm", shape.kv_heads * shape.head_dim


def _config(shape: Shape, eos: list[int]) -> dict[str, Any]:
    kinds = shape.family.layer_types
    return {
        "architectures": [shape.family.architecture],
        "model_type": shape.family.model_type,
        shape.family.activation: shape.family.gate,
        "attention_dropout": 0.0,
        "eos_token_id": eos[0],
        "pad_token_id": eos[1],
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "initializer_range": _INIT_STD,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 8192,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "float32",
        "vocab_size": shape.vocab,
        **shape.family.config,
        **({"layer_types": [kinds[layer % len(kinds)] for layer in range(shape.layers)]} if kinds else {}),
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": _CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
