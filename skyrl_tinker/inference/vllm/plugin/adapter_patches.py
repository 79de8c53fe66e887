"""Patches of vLLM's slots for adapters, of heads and of experts, and of weights loaded again under them."""

from collections.abc import Callable, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from skyrl_tinker.inference.vllm.plugin.replacement import replaces
from skyrl_tinker.inference.vllm.vllm_arguments import expert_slot_rank

if TYPE_CHECKING:
    from vllm.model_executor.models.gpt_oss import GptOssModel

Weights = Iterable[tuple[str, torch.Tensor]]
_QUERIES = {".q_proj.": "q", ".k_proj.": "k", ".v_proj.": "v"}


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


def load_whole_experts() -> None:
    """Load unquantized weights of gpt-oss parameter by parameter, each by its own loader.

    Stock vLLM copies its experts, which are one tensor in files, and the sinks into its parameters without
    the loaders that a reload waits for, and does not find layers that have adapters: the old weights stay,
    without an error.
    """
    from vllm.model_executor.models.gpt_oss import GptOssModel

    @replaces(GptOssModel)
    def load_weights(stock: Any, self: Any, weights: Weights) -> Any:
        return stock(self, weights) if hasattr(self.config, "quantization_config") else _load(self, weights)


def _load(model: "GptOssModel", weights: Weights) -> set[str]:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    parameters = {name.replace(".base_layer.", "."): name for name, _ in model.named_parameters()}
    loaded = set()
    for name, tensor in weights:
        if not is_pp_missing_parameter(name, model):
            own, parts = _parts(name, tensor)
            parameter = model.get_parameter(parameters[own])
            stock = _load_own_heads if name.endswith(".sinks") else default_weight_loader
            loader: Callable[..., Any] = getattr(parameter, "weight_loader", stock)
            for part, options in parts:
                loader(parameter, part, **options)
            loaded.add(parameters[own])
    return loaded


def _parts(name: str, tensor: torch.Tensor) -> tuple[str, list[tuple[torch.Tensor, dict[str, Any]]]]:
    """Return the parameter's name, and the parts of the tensor with the options for its loader."""
    if ".mlp.experts." in name:
        own = name.replace(".mlp.experts.", ".mlp.experts.routed_experts.")
        shard = "gpt_oss_w13" if ".w13_" in name else "gpt_oss_w2"
        options = {"weight_name": own, "shard_id": shard}
        return own, [(part, {**options, "expert_id": expert}) for expert, part in enumerate(tensor)]
    for layer, shard in _QUERIES.items():
        if layer in name:
            return name.replace(layer, ".qkv_proj."), [(tensor, {"loaded_shard_id": shard})]
    return name, [(tensor, {})]


def _load_own_heads(parameter: torch.Tensor, sinks: torch.Tensor) -> None:
    """Load the sinks of this rank's heads, as the loader of vLLM 0.33 does; in 0.32 they have no loader."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    heads = sinks.chunk(get_tensor_model_parallel_world_size())
    default_weight_loader(parameter, heads[get_tensor_model_parallel_rank()])
