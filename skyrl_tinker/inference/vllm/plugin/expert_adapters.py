"""Routed experts with adapters on a CPU, in plain torch: stock vLLM has them in Triton only.

vLLM's FusedMoEWithLoRA stays: it holds the adapters by slot and gives them to the experts' kernel, here
PlainExperts. The weights stay as they were loaded: stock vLLM packs them for its CPU kernel when a model
starts, but not when its weights are loaded again.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    select_unquantized_moe_backend,
)

from skyrl_tinker.inference.vllm.plugin.cpu_patches import Rows, rows_by_slot

Tensors = torch.Tensor | list[torch.Tensor]
_ALPHA, _LIMIT = 1.702, 7.0
"""Constants of gpt-oss's activation, as in vLLM's kernels."""


def apply() -> None:
    """Make vLLM compute routed experts with PlainExperts, with or without adapters.

    Its communicator for CPUs lacks collectives for unequal numbers of rows per rank, which data-parallel
    ranks need for the experts that they share.
    """
    setattr(method, select_unquantized_moe_backend.__name__, _select)
    communicator: type = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv  # type: ignore[attr-defined]


def _select(moe_config: FusedMoEConfig) -> tuple[UnquantizedMoeBackend, type[FusedMoEExperts]]:
    """Replace vLLM's choice of a kernel. Raises NotImplementedError for experts of another kind.

    Also for data-parallel ranks with adapters: rows of other ranks come without their adapters' slots.
    """
    if moe_config.is_lora_enabled and moe_config.moe_parallel_config.dp_size > 1:
        raise NotImplementedError("adapters of experts that data-parallel ranks share")
    supported, reason = FusedMoEExperts.is_supported_config(
        PlainExperts, moe_config, None, None, FusedMoEActivationFormat.Standard
    )
    if not supported:
        raise NotImplementedError(f"experts of this model on a CPU: {reason}")
    return UnquantizedMoeBackend.CPU, PlainExperts


class PlainExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Gated experts: down(activation(gate(x), up(x))), each with the adapter of the row.

    The adapter of gpt-oss has one pair for gate and up, whose outputs are interleaved.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave them as they were loaded."""

    def apply(  # type: ignore[override]
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        """Set `output` to the sum over each row's experts. `expert_map`: each expert's local number or -1."""
        slots = self._slots(len(hidden_states))
        chosen = topk_ids if expert_map is None else expert_map[topk_ids]
        shares = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.zero_()
        for expert in range(len(w1)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                adapted = [(slot, some) for slot, some in rows_by_slot(slots[rows]) if slot >= 0]
                weights = w1[expert], w2[expert]
                results = self._compute(expert, hidden_states[rows], adapted, weights, activation)
                output.index_add_(0, rows, results * shares[rows, places, None].to(results.dtype))

    def activation(
        self,
        activation: MoEActivation,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - vLLM's name
        **options: Any,
    ) -> None:
        """Set `output`; on a CPU vLLM has gpt-oss's activation only within its own experts' kernel."""
        if activation is MoEActivation.SWIGLUOAI:
            gate, up = input[..., ::2].clamp(max=_LIMIT), input[..., 1::2].clamp(-_LIMIT, _LIMIT)
            output.copy_((up + 1) * gate * torch.sigmoid(_ALPHA * gate))
        else:
            super().activation(activation, output, input, **options)

    def _slots(self, count: int) -> torch.Tensor:
        """Return the slot of each row, -1 for the base model."""
        context = self._lora_context
        if context is None:  # this server takes no adapters
            return torch.full((count,), -1)
        return context.punica_wrapper.token_lora_indices[:count]

    def _compute(
        self,
        expert: int,
        inputs: torch.Tensor,
        adapted: list[tuple[int, Rows]],
        weights: tuple[torch.Tensor, torch.Tensor],
        activation: MoEActivation,
    ) -> torch.Tensor:
        """Return the expert's outputs, unweighted. `adapted`: rows by slot; B holds the scale."""
        adapters: Any = self._lora_context
        gate_up, down = weights
        gated = linear(inputs, gate_up, None if self.w1_bias is None else self.w1_bias[expert])
        for slot, rows in adapted:
            a, b = adapters.w13_lora_a_stacked, adapters.w13_lora_b_stacked
            for part, one, other in zip(gated.chunk(len(a), dim=1), a, b, strict=True):
                part[rows] += inputs[rows] @ one[slot, expert].T @ other[slot, expert].T
        middle = gated.new_empty(len(gated), gated.shape[1] // 2)
        self.activation(activation, middle, gated)
        outputs = linear(middle, down, None if self.w2_bias is None else self.w2_bias[expert])
        for slot, rows in adapted:
            a, b = adapters.w2_lora_a_stacked[0][slot, expert], adapters.w2_lora_b_stacked[0][slot, expert]
            outputs[rows] += middle[rows] @ a.T @ b.T
        return outputs


def _all_gatherv(
    self: CpuCommunicator, given: Tensors, dim: int = 0, sizes: list[int] | None = None
) -> Tensors:
    """Return the rows of all ranks, in their order. `sizes`: rows by rank; None: as many as this rank's."""
    if isinstance(given, list):
        return [_all_gatherv(self, each, dim, sizes) for each in given]  # type: ignore[misc]
    sizes = sizes or [len(given)] * self.world_size
    whole = given.new_zeros((sum(sizes), *given.shape[1:]))
    parts = whole.split(sizes)  # type: ignore[no-untyped-call]
    parts[self.rank_in_group].copy_(given)
    for part, rank in zip(parts, self.ranks, strict=True):
        dist.broadcast(part, rank, group=self.device_group)
    return whole


def _reduce_scatterv(
    self: CpuCommunicator, given: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    summed = given.clone()
    dist.all_reduce(summed, group=self.device_group)
    sizes = sizes or [len(given) // self.world_size] * self.world_size
    own: torch.Tensor = summed.split(sizes)[self.rank_in_group]  # type: ignore[no-untyped-call]
    return own
