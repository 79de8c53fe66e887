"""Set of the patches of stock vLLM in our vLLM processes: their targets, refusals and application.

Each patch states the fault that it fixes, and names the functions that it replaces or repeats, by the digests
of their source in known releases. If it matches none, the patch is refused: vLLM may have fixed the fault, or
moved the code.
"""

import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import vllm
from torch.distributed import Backend, distributed_c10d
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version  # type: ignore[attr-defined]

from skyrl_tinker.inference.constants import TOKEN
from skyrl_tinker.inference.vllm.plugin import (
    adapter_patches,
    cpu_patches,
    prompt_scores,
    request_patches,
    signed_pickles,
)
from skyrl_tinker.inference.vllm.plugin.replacement import replaces
from skyrl_tinker.system.listeners import closing_new_listeners
from skyrl_tinker.system.processes import die_with_parent

SUPPORTED = ("0.32.", "0.33.")
LISTED = Path(__file__).with_name("vllm_targets.json")
"""Digests by target and release; `scripts/vllm-targets` writes it."""
STAGED = ("skyrl_staged", "skyrl_tinker.inference.vllm.plugin.weight_receiver", "StagedEngine")
"""Backend name, module and class; vLLM imports the module when it loads the model."""


@dataclass(frozen=True)
class Patch:
    """A patch, and the functions of vLLM that it relies on, by their modules and names.

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
    if not vllm_version.startswith(SUPPORTED):
        accepted = " and ".join(f"vLLM {release}x" for release in SUPPORTED)
        raise RuntimeError(f"skyrl-tinker's patches are for {accepted}, found {vllm_version}")
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
    found = unknown(Path(vllm.__path__[0]), patch.targets)
    if not found:
        return ""
    known = " or ".join(releases())
    return (
        f"vLLM {vllm_version}: skyrl-tinker's patch {patch.name}, needed {patch.needs or 'always'}, is not "
        f"for this release: the source of {', '.join(found)} is unknown. Install {known}"
    )


def digest(root: Path, target: str) -> str | None:
    """Return the SHA-256 of a target's source, read without an import; None if it does not exist.

    `root`: directory of vLLM's package. `target`: module and qualified name, as "v1.outputs:Class.name".
    """
    module, _, qualified = target.partition(":")
    file = root.joinpath(*module.split(".")).with_suffix(".py")
    if not file.exists():
        return None
    lines = file.read_text().splitlines(keepends=True)
    *owner, name = qualified.split(".")
    for each in owner:
        if (start := _start(lines, rf"class {each}\b")) is None:
            return None
        rest = lines[start + 1 :]
        lines = rest[: _start(rest, r"(async def|def|class) ")]
    indent = r"\s+" if owner else ""
    if (start := _start(lines, rf"{indent}(async def|def|class) {name}\b")) is None:
        return None
    return hashlib.sha256("".join(inspect.getblock(lines[start:])).encode()).hexdigest()


def unknown(root: Path, targets: Iterable[str]) -> list[str]:
    """List the targets whose source is that of no release in the table."""
    table = _table(LISTED)
    return [target for target in targets if digest(root, target) not in table.get(target, {}).values()]


def releases() -> list[str]:
    """List the releases of the table."""
    return sorted({release for digests in _table(LISTED).values() for release in digests})


@cache
def _table(file: Path) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = json.loads(file.read_text())
    return table


def _start(lines: list[str], pattern: str) -> int | None:
    return next((number for number, line in enumerate(lines) if re.match(pattern, line)), None)


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
    Patch(prompt_scores.score_with_own_adapters, (f"{_RUNNER}._get_prompt_logprobs_dict", *_LOGITS)),
    Patch(
        prompt_scores.score_other_tokens, (f"{_RUNNER}._get_prompt_logprobs_dict", f"{_RUNNER}.sample_tokens")
    ),
    Patch(
        request_patches.list_routed_experts,
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
    Patch(adapter_patches.load_whole_experts, (_GPT_OSS,), "for gpt-oss", _GPT_OSS),
)
ON_CPU = (
    Patch(cpu_patches.fork_workers, ("platforms.cpu:CpuPlatform.check_and_update_config",)),
    Patch(
        cpu_patches.multiply_by_slot,
        (f"{_OPS}:bgmv_shrink", f"{_OPS}:bgmv_expand", f"{_OPS}:bgmv_expand_slice"),
        _ADAPTERS,
        _LORA_LOAD,
    ),
    Patch(
        cpu_patches.compute_experts_plainly,
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
