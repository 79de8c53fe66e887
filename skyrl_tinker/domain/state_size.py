"""Size of a model in training, from the base model's shapes: weights, gradients and moments in float32."""

from collections.abc import Mapping

from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec, OptimizerFamily

FLOAT32_BYTES = 4
MOMENTS: Mapping[OptimizerFamily, int] = {"adamw": 2, "dimuon": 1}
"""Tensors of the weights' size that an optimizer keeps between steps."""


def state_bytes(facts: BaseModelFacts, spec: LoraSpec, optimizer: OptimizerFamily) -> int:
    """Return the bytes on all ranks together; norms and biases of full-parameter models are left out."""
    return _parameters(facts, spec) * FLOAT32_BYTES * (2 + MOMENTS[optimizer])


def _parameters(facts: BaseModelFacts, spec: LoraSpec) -> int:
    attention, mlp, head = _layers(facts)
    if spec.rank == 0:
        matrices = facts.num_layers * sum(inputs * outputs for inputs, outputs in (*attention, *mlp))
        inputs, outputs = head
        return matrices + inputs * outputs * (1 if facts.tied else 2)
    adapted = [*(attention if spec.train_attn else ()), *(mlp if spec.train_mlp else ())]
    widths = facts.num_layers * sum(inputs + outputs for inputs, outputs in adapted)
    return spec.rank * (widths + (sum(head) if spec.train_unembed else 0))


def _layers(
    facts: BaseModelFacts,
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], tuple[int, int]]:
    """Return (inputs, outputs) of the matrices of one layer's attention and MLP, and of the head."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    attention = (hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)
    return attention, ((hidden, inner), (hidden, inner), (inner, hidden)), (hidden, facts.vocab_size)
