"""Patches of vLLM on CPUs."""

import os
from typing import Any

import torch

from skyrl_tinker.inference.vllm.plugin.replacement import replaces


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
