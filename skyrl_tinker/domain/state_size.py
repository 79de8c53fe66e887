"""Sizes of a base model and of a model in training, by shapes; of the latter all tensors are in float32."""

from collections.abc import Mapping

from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec, OptimizerFamily

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS: Mapping[OptimizerFamily, int] = {"adamw": 2, "dimuon": 1}
"""Tensors of the weights' size that an optimizer keeps between steps."""


def base_bytes(facts: BaseModelFacts, dtype: str) -> int:
    """Return the bytes of a base model's weights, as they are loaded; norms and biases are left out."""
    return parameters(facts, LoraSpec(rank=0, seed=0)) * ELEMENT_BYTES[dtype]


def state_bytes(facts: BaseModelFacts, spec: LoraSpec, optimizer: OptimizerFamily) -> int:
    """Return the bytes on all ranks together; norms and biases of full-parameter models are left out."""
    return parameters(facts, spec) * ELEMENT_BYTES["float32"] * (2 + MOMENTS[optimizer])


def parameters(facts: BaseModelFacts, spec: LoraSpec) -> int:
    """Count those of a model in training."""
    attention, mlp, head = _layers(facts)
    count = max(1, facts.experts)
    if spec.rank == 0:
        of_mlps = count * sum(inputs * outputs for inputs, outputs in mlp)
        router = facts.hidden_size * facts.experts
        layer = sum(inputs * outputs for inputs, outputs in attention) + of_mlps + router
        inputs, outputs = head
        return facts.num_layers * layer + inputs * outputs * (1 if facts.tied else 2)
    per_expert = max(1, spec.rank // facts.experts_per_token)
    widths = spec.rank * sum(map(sum, attention)) if spec.train_attn else 0
    if spec.train_mlp:
        shared = facts.hidden_size if facts.one_pair_for_gate_and_up else 0  # inputs of gate and of up
        widths += count * per_expert * (sum(map(sum, mlp)) - shared)
    return facts.num_layers * widths + (spec.rank * sum(head) if spec.train_unembed else 0)


def cached_bytes(facts: BaseModelFacts, dtype: str) -> int:
    """Return the bytes of a token's keys and values."""
    return 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * ELEMENT_BYTES[dtype]


def _layers(
    facts: BaseModelFacts,
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], tuple[int, int]]:
    """Return (inputs, outputs) of the matrices of a layer's attention and MLP or expert, and of the head."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    attention = (hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)
    return attention, ((hidden, inner), (hidden, inner), (inner, hidden)), (hidden, facts.vocab_size)
