"""Patches of vLLM on CPUs."""

import os
from typing import Any

import torch

from skyrl_tinker.inference.vllm.plugin.replacement import replaces

Rows = torch.Tensor | slice


def fork_workers() -> None:
    """Fork workers: the CPU platform forces `spawn`, which costs 6 to 12 CPU seconds of imports each.

    Forking is safe with OMP_NUM_THREADS=1, which the server sets (libgomp's threads do not survive a fork).
    """
    from vllm.platforms.cpu import CpuPlatform

    @replaces(CpuPlatform)
    def check_and_update_config(configure: Any, vllm_config: Any) -> None:
        configure(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def draw_for_whole_prompts_only() -> None:
    """Keep the generator of a seeded request out of steps that take only a part of its prompt.

    Stock vLLM draws a token there, discards it and resets the generator by a CUDA function, which ends the
    engine on CPU. With the patch a sample does not depend on how the prompt was cut.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner)
    def sample_tokens(sample: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        partial_rows = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        withheld = {row: generators.pop(row) for row in partial_rows if row in generators}
        try:
            return sample(self, *args, **kwargs)
        finally:
            generators.update(withheld)


def zero_reused_blocks() -> None:
    """Zero blocks of the KV cache before they are reused, as a diverged model may have left NaN there.

    Attention multiplies masked values by zero, and zero times NaN is NaN: other models' samples would be
    garbage.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)  # type: ignore[assignment, method-assign]
    prepare_gpu_kernel = "_init_kv_zero_meta"
    setattr(CPUModelRunner, prepare_gpu_kernel, lambda self: None)


def repack_tied_heads() -> None:
    """Repack tied heads after a reload: vLLM packs the embedding again but not the lm_head tied to it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import layerwise

    @replaces(layerwise)
    def finalize_layerwise_processing(finalize: Any, model: torch.nn.Module, model_config: Any) -> None:
        finalize(model, model_config)
        for module in model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


def multiply_by_slot() -> None:
    """Multiply rows by the adapters in their slots, slot by slot.

    Stock vLLM copies a matrix for every row, at 20 times the cost of the product. It also takes slot -1, of
    base-model rows, for the *last* adapter when they share a batch with adapters.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for op in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
        for module in (lora_ops, punica_cpu):  # the sgmv_* ops look them up in the first
            setattr(module, op.__name__, op)


def compute_experts_plainly() -> None:
    from skyrl_tinker.inference.vllm.plugin import expert_adapters  # takes seconds of vLLM's imports

    expert_adapters.apply()


def bgmv_shrink(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Set output[row] = scaling * A[slot of row] @ inputs[row]; zero where the slot is negative."""
    for slot, rows in rows_by_slot(slots):
        if slot < 0:
            output[rows] = 0
        else:
            matrix = _matrix(weights, slot, output.dtype)
            output[rows, : len(matrix)] = scaling * (inputs[rows].to(output.dtype) @ matrix.T)


def bgmv_expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Call bgmv_expand_slice on the columns that both sides have: they may be padded differently."""
    width = min(weights.shape[-2], output.shape[1])
    bgmv_expand_slice(inputs, weights[..., :width, :], output, slots, 0, width, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Add to output[row, slice] += B[slot of row] @ inputs[row]; base rows (slot < 0) get nothing added."""
    columns = output[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        columns.zero_()
    for slot, rows in rows_by_slot(slots):
        if slot >= 0:
            columns[rows] += inputs[rows].to(output.dtype) @ _matrix(weights, slot, output.dtype).T


def rows_by_slot(slots: torch.Tensor) -> list[tuple[int, Rows]]:
    """List the rows of each slot; a single slot stands for all rows."""
    first = int(slots[0])
    if bool((slots == first).all()):
        return [(first, slice(None))]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in torch.unique(slots).tolist()]


def _matrix(weights: torch.Tensor, slot: int, dtype: torch.dtype) -> torch.Tensor:
    """Slice [slots, 1, out, in] or [slots, out, in] to [out, in]."""
    return weights[slot].reshape(-1, weights.shape[-1]).to(dtype)
