"""Patches of stock vLLM in our vLLM processes. Runs inside vLLM only.

Each patch states the fault that it fixes, and names the functions that it replaces or repeats. If their
source matches no known release, the patch is refused: vLLM may have fixed the fault, or moved the code.
"""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm
from torch.distributed import Backend, distributed_c10d
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version  # type: ignore[attr-defined]

from skyrl_tinker.inference.constants import TOKEN
from skyrl_tinker.inference.plugin import (
    prompt_adapters,
    score_extraction,
    signed_pickles,
    slot_products,
)
from skyrl_tinker.inference.plugin.replacement import replaces
from skyrl_tinker.inference.vllm import vllm_targets
from skyrl_tinker.inference.vllm.vllm_arguments import expert_slot_rank
from skyrl_tinker.system.listeners import closing_new_listeners
from skyrl_tinker.system.processes import die_with_parent

STAGED = ("skyrl_staged", "skyrl_tinker.weight_sync.vllm_receiver", "StagedEngine")
"""Backend name, module and class; vLLM imports the module when it loads the model."""


@dataclass(frozen=True)
class Patch:
    """A patch, and the functions of vLLM that it relies on, as vllm_targets names them.

    `needs`: the condition under which it is necessary; `gate`: a function that vLLM calls at start under this
    condition. Without both it is always necessary.
    """

    apply: Callable[[], None]
    targets: tuple[str, ...]
    needs: str = ""
    gate: str = ""

    @property
    def name(self) -> str:
        return f"{self.apply.__module__.rpartition('.')[2]}.{self.apply.__name__}"


def apply() -> None:
    """Apply all patches once per process. Raises RuntimeError in a release that they are not written for."""
    if not vllm_version.startswith(vllm_targets.SUPPORTED):
        raise RuntimeError(f"skyrl-tinker's patches are for {_releases()}, found {vllm_version}")
    if STAGED[0] in WeightTransferEngineFactory._registry:
        return
    patches = (*PATCHES, *(ON_CPU if current_platform.is_cpu() else ()))
    refusals = {patch: reason for patch in patches if (reason := _refusal(patch))}
    for patch, reason in refusals.items():
        if not patch.gate:
            raise RuntimeError(reason)
        _refuse_at(patch.gate, reason)
    WeightTransferEngineFactory.register_engine(*STAGED)
    _end_with_parent()
    _close_meeting_ports()
    if token := os.environ.get(TOKEN):  # servers that users start themselves have none
        signed_pickles.apply(token)
    for patch in patches:
        if patch not in refusals:
            patch.apply()


def _releases() -> str:
    return " and ".join(f"vLLM {release}x" for release in vllm_targets.SUPPORTED)


def _known() -> str:
    return " or ".join(vllm_targets.releases())


def _refusal(patch: Patch) -> str:
    """Return the reason not to apply a patch to this vLLM; empty if it may be applied."""
    found = vllm_targets.unknown(Path(vllm.__path__[0]), patch.targets)
    if not found:
        return ""
    return (
        f"vLLM {vllm_version}: skyrl-tinker's patch {patch.name}, needed {patch.needs or 'always'}, is not "
        f"for this release: the source of {', '.join(found)} is unknown. Install {_known()}"
    )


def _refuse_at(gate: str, reason: str) -> None:
    """Make a function of vLLM, which is called where a patch is needed, raise RuntimeError."""
    module, _, qualified = gate.partition(":")
    owner: Any = importlib.import_module(f"vllm.{module}")
    *outer, name = qualified.split(".")
    for each in outer:
        owner = getattr(owner, each)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(reason)

    setattr(owner, name, refuse)


def _end_with_parent() -> None:
    """End the engine process with its API server: it would survive a killed one."""
    end = partial(die_with_parent, signal.SIGKILL)
    os.register_at_fork(after_in_child=end)
    if multiprocessing.parent_process() is not None:
        end()


def _close_meeting_ports() -> None:
    """Close gloo's ports, which require no token, once the members have met.

    NCCL's ports stay: it makes some of its connections later.
    """

    @replaces(distributed_c10d)
    def _new_process_group_helper(
        meet: Any, size: int, rank: int, ranks: Any, backend: str, *args: Any, **kwargs: Any
    ) -> Any:
        with closing_new_listeners() if backend == Backend.GLOO else nullcontext():
            return meet(size, rank, ranks, backend, *args, **kwargs)


def _fork_workers() -> None:
    """Fork workers: the CPU platform forces `spawn`, which costs 6 to 12 CPU seconds of imports each.

    Forking is safe with OMP_NUM_THREADS=1, which the server sets (libgomp's threads do not survive a fork).
    """
    from vllm.platforms.cpu import CpuPlatform

    @replaces(CpuPlatform)
    def check_and_update_config(configure: Any, vllm_config: Any) -> None:
        configure(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _adapt_every_head() -> None:
    """Accept adapters of lm_head for every model.

    Stock vLLM refuses them for classes that do not list the layer, among them Qwen2, Mistral and Gemma 3.
    """
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    @replaces(LoRAModelRunnerMixin)
    def load_lora_model(load: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        model.embedding_modules = {**model.embedding_modules, "lm_head": "output_embeddings"}
        return load(self, model, *args, **kwargs)


def _adapt_large_heads() -> None:
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


def _load_adapted_experts() -> None:
    """Load experts by their names in checkpoints, also after the LoRA layer has been put around them.

    Stock vLLM then expects `base_layer` in these names, and keeps the old weights without an error.
    """
    from vllm.lora.layers import FusedMoEWithLoRA

    @replaces(FusedMoEWithLoRA)
    def __init__(wrap: Any, self: Any, base_layer: Any) -> None:  # noqa: N807 - its name there
        wrap(self, base_layer)
        base_layer.routed_experts.lora_base_layer_prefix = ""


def _divide_rank_among_experts() -> None:
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


def _keep_experts_as_loaded() -> None:
    """Leave out the kernel of Blackwell GPUs that needs experts in a special layout.

    Stock vLLM makes this layout when it starts, but not when weights are loaded again under adapters.
    """
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    special = unquantized._trtllm_bf16_lora_supported
    setattr(unquantized, special.__name__, lambda moe_config: False)


def _count_cached_prompts_once() -> None:
    """Report the smallest count of cached tokens among n sequences, that of the first to be prefilled.

    Stock vLLM reports the count of the last to end, which includes tokens cached by its siblings.
    """
    from vllm.v1.engine.output_processor import RequestState

    @replaces(RequestState)
    def make_request_output(make: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        parent = self.parent_req
        if parent is not None:
            fewest = min(self.num_cached_tokens, getattr(parent, "fewest_cached", self.num_cached_tokens))
            parent.fewest_cached = self.num_cached_tokens = fewest
        return make(self, *args, **kwargs)


def _keep_request_ids() -> None:
    """Take the id of a request from its body, so that it can be aborted by this id.

    Stock vLLM prefers the header, in which a router with disaggregation sends another id.
    """
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    @replaces(ServingTokens)
    def _base_request_id(name: Any, raw_request: Any, default: str | None = None) -> Any:
        return default or name(raw_request)


def _know_routes() -> None:
    from skyrl_tinker.inference.plugin import routed_experts  # seconds of vLLM's imports

    routed_experts.apply()


def _know_whole_experts() -> None:
    from skyrl_tinker.inference.plugin import whole_experts  # seconds of vLLM's imports

    whole_experts.apply()


def _adapt_experts() -> None:
    from skyrl_tinker.inference.plugin import expert_adapters  # vLLM's kernels for CPUs

    expert_adapters.apply()


def _draw_for_whole_prompts_only() -> None:
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


def _zero_reused_blocks() -> None:
    """Zero blocks of the KV cache before they are reused, as a diverged model may have left NaN there.

    Attention multiplies masked values by zero, and zero times NaN is NaN: other models' samples would be
    garbage.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)  # type: ignore[assignment, method-assign]
    prepare_gpu_kernel = "_init_kv_zero_meta"
    setattr(CPUModelRunner, prepare_gpu_kernel, lambda self: None)


def _repack_tied_heads() -> None:
    """Repack tied heads after a reload: vLLM packs the embedding again but not the lm_head tied to it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import layerwise

    @replaces(layerwise)
    def finalize_layerwise_processing(finalize: Any, model: torch.nn.Module, model_config: Any) -> None:
        finalize(model, model_config)
        for module in model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
_LORA_LOAD = "v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model"
_HEAD = "lora.layers.logits_processor:LogitsProcessorWithLoRA"
_EXPERTS = "lora.layers.fused_moe:FusedMoEWithLoRA"
_TOKENS = "entrypoints.scale_out.token_in_token_out.serving:ServingTokens"
_AUX = "distributed.aux_output_connector"
_OPS = "lora.ops.torch_ops.lora_ops"
_GPT_OSS = "model_executor.models.gpt_oss:GptOssModel.load_weights"
_KERNELS = "model_executor.layers.fused_moe"
_RELOAD = "model_executor.model_loader.reload.layerwise:finalize_layerwise_processing"
_ADAPTERS = "where max_lora_rank is above 0"
_ADAPTED_EXPERTS = "for mixtures of experts where max_lora_rank is above 0"
_LOGITS = (
    "lora.punica_wrapper.punica_base:PunicaWrapperBase._update_base_metadata",
    f"{_HEAD}._get_logits",
)

PATCHES = (
    Patch(_count_cached_prompts_once, ("v1.engine.output_processor:RequestState.make_request_output",)),
    Patch(
        _keep_request_ids,
        (
            "entrypoints.serve.engine.serving:BaseServing._base_request_id",
            f"{_TOKENS}.serve_tokens_full_generator",
        ),
    ),
    Patch(_adapt_every_head, (_LORA_LOAD,), _ADAPTERS, _LORA_LOAD),
    Patch(_adapt_large_heads, (f"{_HEAD}.create_lora_weights",), _ADAPTERS, _LORA_LOAD),
    Patch(_load_adapted_experts, (f"{_EXPERTS}.__init__",), _ADAPTED_EXPERTS, f"{_EXPERTS}.__init__"),
    Patch(
        _divide_rank_among_experts,
        (f"{_EXPERTS}.create_lora_weights", f"{_EXPERTS}.set_lora"),
        _ADAPTED_EXPERTS,
        f"{_EXPERTS}.__init__",
    ),
    Patch(
        _keep_experts_as_loaded,
        (f"{_KERNELS}.oracle.unquantized:_trtllm_bf16_lora_supported",),
        _ADAPTED_EXPERTS,
        f"{_EXPERTS}.__init__",
    ),
    Patch(prompt_adapters.apply, (f"{_RUNNER}._get_prompt_logprobs_dict", *_LOGITS)),
    Patch(score_extraction.apply, (f"{_RUNNER}._get_prompt_logprobs_dict", f"{_RUNNER}.sample_tokens")),
    Patch(
        _know_routes,
        (
            f"{_RUNNER}.initialize_kv_cache",
            f"{_RUNNER}.execute_model",
            f"{_RUNNER}.sample_tokens",
            "config.vllm:VllmConfig._verify_aux_output_compatibility",
            f"{_AUX}.worker:get_aux_output_connector",
            f"{_AUX}.worker:PendingAuxOutput",
        ),
        "with router_replay",
        f"{_AUX}.worker:get_aux_output_connector",
    ),
    Patch(_know_whole_experts, (_GPT_OSS,), "for gpt-oss", _GPT_OSS),
)
ON_CPU = (
    Patch(_fork_workers, ("platforms.cpu:CpuPlatform.check_and_update_config",)),
    Patch(
        slot_products.apply,
        (f"{_OPS}:bgmv_shrink", f"{_OPS}:bgmv_expand", f"{_OPS}:bgmv_expand_slice"),
        _ADAPTERS,
        _LORA_LOAD,
    ),
    Patch(
        _adapt_experts,
        (
            f"{_KERNELS}.oracle.unquantized:select_unquantized_moe_backend",
            f"{_KERNELS}.experts.cpu_moe:CPUUnquantizedExperts",
            f"{_KERNELS}.experts.lora_experts_mixin:LoRAExpertsMixin",
        ),
        "for mixtures of experts",
        f"{_KERNELS}.unquantized_fused_moe_method:select_unquantized_moe_backend",
    ),
    Patch(_draw_for_whole_prompts_only, (f"{_RUNNER}.sample_tokens",)),
    Patch(
        _zero_reused_blocks,
        (
            "v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing",
            f"{_RUNNER}._init_kv_zero_meta",
        ),
    ),
    Patch(_repack_tied_heads, (_RELOAD,)),
)
