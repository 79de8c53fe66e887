"""Patches of vLLM's slots for adapters, of heads and of experts."""

from copy import copy
from typing import Any

import torch

from skyrl_tinker.inference.vllm.plugin.replacement import replaces
from skyrl_tinker.inference.vllm.vllm_arguments import expert_slot_rank


def adapt_every_head() -> None:
    """Accept adapters of lm_head for every model.

    Stock vLLM refuses them for classes that do not list the layer, among them Qwen2, Mistral and Gemma 3.
    """
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    @replaces(LoRAModelRunnerMixin)
    def load_lora_model(load: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        model.embedding_modules = {**model.embedding_modules, "lm_head": "output_embeddings"}
        return load(self, model, *args, **kwargs)


def adapt_large_heads() -> None:
    """Accept adapters of lm_head for vocabularies of more than 258,048 tokens, as Gemma 3 has.

    Stock vLLM refuses them because of kernels that it no longer has: those of 0.32 and 0.33 take any size.
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA

    @replaces(LogitsProcessorWithLoRA)
    def create_lora_weights(create: Any, self: Any, max_loras: int, lora_config: Any, *args: Any) -> None:
        head, size = self.base_layer, self.base_layer.vocab_size
        head.vocab_size = 0
        try:
            create(self, max_loras, lora_config, *args)
        finally:
            head.vocab_size = size
        self.lora_b_stacked = self.lora_b_stacked.new_zeros(max_loras, 1, size, lora_config.max_lora_rank)


def load_adapted_experts() -> None:
    """Load experts by their names in checkpoints, also after the LoRA layer has been put around them.

    Stock vLLM then expects `base_layer` in these names, and keeps the old weights without an error.
    """
    from vllm.lora.layers import FusedMoEWithLoRA

    @replaces(FusedMoEWithLoRA)
    def __init__(wrap: Any, self: Any, base_layer: Any) -> None:  # noqa: N807 - its name there
        wrap(self, base_layer)
        base_layer.routed_experts.lora_base_layer_prefix = ""


def divide_rank_among_experts() -> None:
    """Give experts' slots the rank of our adapters for experts: divided by the experts chosen per token.

    Stock vLLM gives each expert's slots the whole rank. Raises ValueError for an adapter of a higher rank.
    """
    from vllm.lora.layers import FusedMoEWithLoRA

    @replaces(FusedMoEWithLoRA)
    def create_lora_weights(
        create: Any, self: Any, max_loras: int, lora_config: Any, model_config: Any = None
    ) -> None:
        slots = copy(lora_config)
        slots.max_lora_rank = expert_slot_rank(lora_config.max_lora_rank, self.moe_config.experts_per_token)
        create(self, max_loras, slots, model_config)

    @replaces(FusedMoEWithLoRA)
    def set_lora(
        fill: Any, self: Any, index: int, lora_a: list[torch.Tensor], lora_b: list[torch.Tensor]
    ) -> None:
        found, most = lora_a[0].shape[1], self.w2_lora_a_stacked[0].shape[2]
        if found > most:
            raise ValueError(f"an adapter has rank {found} for each expert, expected at most {most}")
        fill(self, index, lora_a, lora_b)


def keep_experts_as_loaded() -> None:
    """Leave out the kernel of Blackwell GPUs that needs experts in a special layout.

    Stock vLLM makes this layout when it starts, but not when weights are loaded again under adapters.
    """
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    special = unquantized._trtllm_bf16_lora_supported
    setattr(unquantized, special.__name__, lambda moe_config: False)
