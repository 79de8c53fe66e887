"""Set of the patches of stock vLLM in our vLLM processes: their targets, refusals and application.

Each patch states the fault that it fixes, and names the functions that it replaces or repeats. If their
source matches no known release, the patch is refused: vLLM may have fixed the fault, or moved the code.
"""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import vllm
from torch.distributed import Backend, distributed_c10d
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version  # type: ignore[attr-defined]

from skyrl_tinker.inference.constants import TOKEN
from skyrl_tinker.inference.vllm import vllm_targets
from skyrl_tinker.inference.vllm.plugin import (
    adapter_patches,
    cpu_patches,
    prompt_adapters,
    request_patches,
    score_extraction,
    signed_pickles,
    slot_products,
)
from skyrl_tinker.inference.vllm.plugin.replacement import replaces
from skyrl_tinker.system.listeners import closing_new_listeners
from skyrl_tinker.system.processes import die_with_parent

STAGED = ("skyrl_staged", "skyrl_tinker.inference.vllm.plugin.weight_receiver", "StagedEngine")
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
        releases = " and ".join(f"vLLM {release}x" for release in vllm_targets.SUPPORTED)
        raise RuntimeError(f"skyrl-tinker's patches are for {releases}, found {vllm_version}")
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


def _refusal(patch: Patch) -> str:
    """Return the reason not to apply a patch to this vLLM; empty if it may be applied."""
    found = vllm_targets.unknown(Path(vllm.__path__[0]), patch.targets)
    if not found:
        return ""
    known = " or ".join(vllm_targets.releases())
    return (
        f"vLLM {vllm_version}: skyrl-tinker's patch {patch.name}, needed {patch.needs or 'always'}, is not "
        f"for this release: the source of {', '.join(found)} is unknown. Install {known}"
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


def _later(module: str) -> Callable[[], None]:
    """Return `apply` of a module here that takes seconds of vLLM's imports, made when it is called."""

    def apply() -> None:
        importlib.import_module(f"{__package__}.{module}").apply()

    apply.__module__ = module
    return apply


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
_LOGITS = ("lora.punica_wrapper.punica_base:PunicaWrapperBase._update_base_metadata", f"{_HEAD}._get_logits")

PATCHES = (
    Patch(
        request_patches.count_cached_prompts_once,
        ("v1.engine.output_processor:RequestState.make_request_output",),
    ),
    Patch(
        request_patches.keep_request_ids,
        (
            "entrypoints.serve.engine.serving:BaseServing._base_request_id",
            f"{_TOKENS}.serve_tokens_full_generator",
        ),
    ),
    Patch(adapter_patches.adapt_every_head, (_LORA_LOAD,), _ADAPTERS, _LORA_LOAD),
    Patch(adapter_patches.adapt_large_heads, (f"{_HEAD}.create_lora_weights",), _ADAPTERS, _LORA_LOAD),
    Patch(
        adapter_patches.load_adapted_experts,
        (f"{_EXPERTS}.__init__",),
        _ADAPTED_EXPERTS,
        f"{_EXPERTS}.__init__",
    ),
    Patch(
        adapter_patches.divide_rank_among_experts,
        (f"{_EXPERTS}.create_lora_weights", f"{_EXPERTS}.set_lora"),
        _ADAPTED_EXPERTS,
        f"{_EXPERTS}.__init__",
    ),
    Patch(
        adapter_patches.keep_experts_as_loaded,
        (f"{_KERNELS}.oracle.unquantized:_trtllm_bf16_lora_supported",),
        _ADAPTED_EXPERTS,
        f"{_EXPERTS}.__init__",
    ),
    Patch(prompt_adapters.apply, (f"{_RUNNER}._get_prompt_logprobs_dict", *_LOGITS)),
    Patch(score_extraction.apply, (f"{_RUNNER}._get_prompt_logprobs_dict", f"{_RUNNER}.sample_tokens")),
    Patch(
        _later("routed_experts"),
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
    Patch(_later("whole_experts"), (_GPT_OSS,), "for gpt-oss", _GPT_OSS),
)
ON_CPU = (
    Patch(cpu_patches.fork_workers, ("platforms.cpu:CpuPlatform.check_and_update_config",)),
    Patch(
        slot_products.apply,
        (f"{_OPS}:bgmv_shrink", f"{_OPS}:bgmv_expand", f"{_OPS}:bgmv_expand_slice"),
        _ADAPTERS,
        _LORA_LOAD,
    ),
    Patch(
        _later("expert_adapters"),
        (
            f"{_KERNELS}.oracle.unquantized:select_unquantized_moe_backend",
            f"{_KERNELS}.experts.cpu_moe:CPUUnquantizedExperts",
            f"{_KERNELS}.experts.lora_experts_mixin:LoRAExpertsMixin",
        ),
        "for mixtures of experts",
        f"{_KERNELS}.unquantized_fused_moe_method:select_unquantized_moe_backend",
    ),
    Patch(cpu_patches.draw_for_whole_prompts_only, (f"{_RUNNER}.sample_tokens",)),
    Patch(
        cpu_patches.zero_reused_blocks,
        ("v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing", f"{_RUNNER}._init_kv_zero_meta"),
    ),
    Patch(cpu_patches.repack_tied_heads, (_RELOAD,)),
)
