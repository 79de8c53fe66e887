"""Facts of the base model that the API of these tests serves, for processes that import no API."""

from skyrl_tinker.domain.values import BaseModelFacts

BASE = "org/tiny"
VOCABULARY = 512
CONTEXT = 64
FACTS = BaseModelFacts(
    directory="/models/tiny",
    names=(BASE, "/models/tiny"),
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCABULARY,
    context_length=CONTEXT,
    num_layers=2,
    num_kv_heads=2,
    head_dim=32,
    hidden_size=64,
    tied=True,
    eos_token_ids=(0,),
    num_heads=2,
    intermediate_size=128,
)
