"""Model families of small models: their differences in config.json and in a layer's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_tinker.errors import StartupError
from skyrl_tinker.server.base_models.sliding_windows import FULL, SLIDING

WINDOW = 16
"""Tokens of a sliding window, where a family has one: fewer than in most prompts."""

EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Family:
    """Family as transformers names it; `config`: its own entries of config.json."""

    architecture: str
    model_type: str
    config: Mapping[str, Any]
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: bool = False  # of queries and keys
    wide_norms: bool = False  # of those of all heads together
    query_biases: bool = False  # of queries, keys and values
    output_biases: bool = False  # of attention
    sinks: bool = False  # of attention
    plain_norm: float = 1.0  # weight of a norm that changes nothing
    activation: str = "hidden_act"  # name of that entry in config.json
    gate: str = "silu"
    experts: int = 0  # in every layer, in place of an MLP
    layer_types: tuple[str, ...] = ()  # of the layers, over and over; () where config.json has none
    untied: bool = False  # its head is never the embedding
    whole_experts: bool = False  # of all experts one tensor in files, with biases, as is their router's


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", {"attention_bias": False}, head_norms=True),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            "attention_bias": False,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        head_norms=True,
        experts=EXPERTS,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
        query_biases=True,
    ),
    "llama": Family("LlamaForCausalLM", "llama", {"attention_bias": False, "mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", "mistral", {"sliding_window": WINDOW}),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "attention_bias": False,
            "query_pre_attn_scalar": 32,
            "rope_local_base_freq": 1000.0,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,  # every second layer sees all
        },
        layer_norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        head_norms=True,
        plain_norm=0.0,
        activation="hidden_activation",
        gate="gelu_pytorch_tanh",
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        "olmo3",
        {"attention_bias": False, "sliding_window": WINDOW},
        layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        wide_norms=True,
        layer_types=(SLIDING, FULL),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "granite",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
        },
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "attention_bias": True,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 4,
            "intermediate_size": 64,
            "swiglu_limit": 7.0,
            "sliding_window": WINDOW,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        query_biases=True,
        output_biases=True,
        sinks=True,
        experts=EXPERTS,
        layer_types=(SLIDING, FULL),
        untied=True,
        whole_experts=True,
    ),
}


def find_family(arch: str) -> Family:
    """Return a family by its name. Raises StartupError for an unknown one."""
    if arch not in FAMILIES:
        raise StartupError(f"--arch must be one of {', '.join(FAMILIES)}, found {arch}")
    return FAMILIES[arch]
