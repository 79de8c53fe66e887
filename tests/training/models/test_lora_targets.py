import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Phi3Config, PreTrainedConfig

from skyrl_tinker.errors import StartupError
from skyrl_tinker.training.models.lora import find_targets

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Phi3Config(**SHAPE), "Phi3ForCausalLM: .* leave out model.layers.0.mlp.gate_up_proj and 3 others"),
        (
            MixtralConfig(**SHAPE, num_local_experts=4),
            "MixtralForCausalLM: .* leave out model.layers.0.mlp.experts.down_proj and 3 others",
        ),
    ],
    ids=["fused projections", "experts"],
)
def test_layers_that_adapters_would_leave_out_are_refused(config: PreTrainedConfig, message: str) -> None:
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config)
    with pytest.raises(StartupError, match=message):
        find_targets(causal_lm, causal_lm.get_output_embeddings())
