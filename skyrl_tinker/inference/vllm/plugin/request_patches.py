"""Patches of how vLLM answers a request."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_tinker.inference.vllm.plugin.replacement import replaces

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.worker import PendingAuxOutput


def count_cached_prompts_once() -> None:
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


def keep_request_ids() -> None:
    """Take the id of a request from its body, so that it can be aborted by this id.

    Stock vLLM prefers the header, in which a router with disaggregation sends another id.
    """
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    @replaces(ServingTokens)
    def _base_request_id(name: Any, raw_request: Any, default: str | None = None) -> Any:
        return default or name(raw_request)


def list_routed_experts() -> None:
    """List the experts that each token was routed to (`--enable-return-routed-experts`).

    Stock vLLM captures, stores and returns them in its second model runner only. Here the first one, which
    runs LoRA and the CPU, does so too, by vLLM's own connector.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    runner.aux_output_connector = None

    @replaces(runner)
    def initialize_kv_cache(
        initialize: Any, self: Any, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        initialize(self, kv_cache_config, is_profiling, **kwargs)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self.aux_output_connector = get_aux_output_connector(
                self.get_model(), self.vllm_config, kv_cache_config
            )

    @replaces(runner)
    def execute_model(execute: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.aux_output_connector is not None:
            self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *args, **kwargs)

    @replaces(runner)
    def sample_tokens(sample: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        pending = _pending(self)
        output = sample(self, *args, **kwargs)
        return output if pending is None else _with_experts(output, pending)

    @replaces(VllmConfig)
    def _verify_aux_output_compatibility(verify: Any, self: Any) -> None:
        if self.aux_output_config.enabled and self.speculative_config is not None:
            raise ValueError("routed experts are not captured with speculative decoding")
        verify(_AsForSecondRunner(self))


class _AsForSecondRunner:
    """A view of vLLM's configuration in which the second model runner is chosen."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _pending(runner: Any) -> "PendingAuxOutput | None":
    """Start the copy of this step's experts to the host, before sampling, which waits for its own copies."""
    if runner.aux_output_connector is None or runner.execute_model_state is None:
        return None
    batch, count = runner.input_batch, runner.input_batch.num_reqs
    step: Any = SimpleNamespace(
        req_ids=batch.req_ids,
        query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
    )
    pending: PendingAuxOutput | None = runner.aux_output_connector.prepare_output(step)
    if pending is not None:
        whole = ~runner.discard_request_mask.np[:count]  # not a part of a prompt, after which none is sampled
        pending.enqueue_cpu_copy(whole.astype(np.int32), np.zeros(count, np.int32))
    return pending


def _with_experts(output: Any, pending: "PendingAuxOutput") -> Any:
    """Add the experts to a step's output, once the copies of an asynchronous one have ended."""
    if not hasattr(output, "get_output"):
        output.aux_output_connector_output = pending.process_output()
        return output
    get = output.get_output

    def get_output() -> Any:
        result = get()
        result.aux_output_connector_output = pending.process_output()
        return result

    output.get_output = get_output
    return output
