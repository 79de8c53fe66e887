"""Weights of gpt-oss, whose experts are one tensor in files, loaded again into a running server.

Stock vLLM copies them, and the sinks, into its parameters without the loaders that a reload waits for, and
does not find layers that have adapters: the old weights stay, without an error.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssModel
from vllm.model_executor.models.utils import is_pp_missing_parameter

from skyrl_tinker.inference.vllm.plugin.replacement import replaces

Weights = Iterable[tuple[str, torch.Tensor]]

_QUERIES = {".q_proj.": "q", ".k_proj.": "k", ".v_proj.": "v"}


def apply() -> None:
    """Load unquantized weights of gpt-oss parameter by parameter, each by its own loader."""

    @replaces(GptOssModel)
    def load_weights(stock: Any, self: GptOssModel, weights: Weights) -> Any:
        return stock(self, weights) if hasattr(self.config, "quantization_config") else _load(self, weights)


def _load(model: GptOssModel, weights: Weights) -> set[str]:
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
    heads = sinks.chunk(get_tensor_model_parallel_world_size())
    default_weight_loader(parameter, heads[get_tensor_model_parallel_rank()])
